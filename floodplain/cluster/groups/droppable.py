"""An instance that can drop layers: it has all layers while it serves alone, and some in a group (KunServe, section 4).

Each layer's parameters lie in their own pages, which can become KV. On a CPU matrices stay unpacked for this reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.groups.membership import GroupPipeline, Membership
from floodplain.cluster.instance.instance import Replica, find_own_host
from floodplain.cluster.instance.session import Role, Session
from floodplain.cluster.sums import StatsTable, since
from floodplain.cluster.wire import group_messages as wire
from floodplain.core.errors import InvariantError, UserError
from floodplain.core.request import Request
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.backstop import default_backstop_folder, open_backstop
from floodplain.engine.build import OpenedEngine, open_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.engine.step_meter import StepMeter
from floodplain.runtime.handover import Record

logger = logging.getLogger(__name__)


def open_droppable(config: EngineConfig, folder: Path | None, router_host: str) -> Replica:
    """Load a model whose layers can be dropped, and open its backstop, in ``folder`` or the default one.

    Other instances reach this one by the network of ``router_host``. Raises ``UserError`` as ``build_engine``; or the
    backstop cannot be written, or the pool has too few whole quanta.
    """
    opened = open_engine(replace(config, pack_weights=False))
    try:
        _shrink_to_whole_quanta(opened, is_length_asked=config.max_model_len is not None)
        folder = default_backstop_folder() if folder is None else folder
        backstop = open_backstop(folder, opened.parts.fingerprint, opened.memory.layer_buffers)
        opened.engine.idle_memory = None  # in a group the pool holds blocks that its own ledger does not know
        member = GroupMember(opened, AsyncEngine(opened.engine), backstop, find_own_host(router_host))
        return Replica(member.engine, member, partial(GroupRole, member=member), can_drop=True)
    except BaseException:
        opened.engine.close()
        raise


def _shrink_to_whole_quanta(opened: OpenedEngine, *, is_length_asked: bool) -> None:
    """Release the last, partial quantum: a group divides pages by whole quanta."""
    pool, state = opened.pool, opened.engine.loop.state
    rest = pool.num_blocks % pool.quantum_blocks
    if rest:
        opened.memory.device.release(pool.shrink(state.ledger, pool.num_blocks - rest).pages)
    num_tokens, longest = pool.num_blocks * state.ledger.block_tokens, state.config.max_model_len
    if num_tokens >= longest:
        return
    if is_length_asked or num_tokens < 2:
        raise UserError(
            f"--kv-memory holds {num_tokens} tokens in whole quanta of {pool.quantum_blocks} blocks, fewer than "
            f"--max-model-len {longest}: raise it"
        )
    logger.warning("max_model_len is lowered from %d to %d tokens: whole quanta hold no more", longest, num_tokens)
    state.config = replace(state.config, max_model_len=num_tokens)


_OWN, _GROUP = 0, 1


class GroupRole(Role):
    """Executes group orders."""

    orders = get_args(wire.GroupOrder)
    peers = "group"

    def __init__(self, session: Session, member: GroupMember) -> None:
        super().__init__(session)
        self.num_layers = len(member.param_pages)
        self._member = member
        self._membership: Membership | None = None
        self._counted = StatsTable()

    def find_failure(self) -> BaseException | None:
        """The failure of the own engine or of the group's pipeline; None if there is none."""
        in_group = None if self._pipeline is None else self._pipeline.failure
        return self._member.engine.failure or in_group

    async def end(self) -> None:
        """Leave any group. ``UserError`` if dropped parameters cannot be read from the backstop."""
        if self._membership is not None:
            await self._membership.abandon()

    def stats(self) -> EngineStats:
        """The sum of what the own engine and the group's engine counted."""
        self._counted.note(_OWN, since(self._member.engine.stats(), self._before))
        if self._pipeline is not None and self._pipeline.engine is not None:
            self._counted.note(_GROUP, self._pipeline.engine.stats())
        return self._counted.total()

    def meter(self) -> StepMeter | None:
        """The step meter of the group's pipeline, or else of the own engine."""
        return super().meter() if self._pipeline is None else self._pipeline.meter

    @property
    def _pipeline(self) -> GroupPipeline | None:
        """The group's pipeline; the old group's while a group that takes it in is being prepared."""
        membership = self._membership
        if membership is not None and membership.old is not None:
            return membership.old.pipeline
        return None if membership is None else membership.pipeline

    def obey(self, order: wire.GroupOrder, integers: tuple[int, ...]) -> None:
        """Execute, or begin, a group order."""
        if isinstance(order, wire.Prepare) and (self._membership is None or self._membership.pipeline is not None):
            self._membership = Membership(self._member, order.number, self._membership)
        membership = self._membership
        if membership is None or membership.number != order.number:
            return
        match order:
            case wire.Cancel():
                membership.cancel()
                self._membership = membership.old
            case wire.Adopt():
                stream = self._session.begin(
                    order.submit, integers, membership.adopter(order.request, order.num_computed)
                )
                stream.add_done_callback(lambda _: membership.release(order.request))  # in case it ended before it ran
            case wire.Release():
                membership.release(order.request)
            case wire.Grow() if membership.pipeline is not None:
                membership.pipeline.grow(order.num_quanta)
            case _:
                self._session.start(self._carry_out(membership, order, integers))

    async def _carry_out(self, membership: Membership, order: wire.GroupOrder, integers: tuple[int, ...]) -> None:
        """Execute one order that takes time. The router sends the next one when all members have answered."""
        match order:
            case wire.Prepare():
                await self._prepare(membership)
            case wire.Drop():
                await self._drop(membership, order, integers)
            case wire.Fetch():
                await membership.fetch(order, integers, self._note_copied(order, wire.Answer.FETCHED))
            case wire.Settle():
                await membership.settle(order.num_quanta)
                self._say(order, wire.Answer.SETTLED)
            case wire.Plan():
                await self._plan(membership, order)
            case wire.Move():
                flat, quanta = integers[: 2 * order.num_moves], integers[2 * order.num_moves :]
                await membership.move(list(zip(flat[::2], flat[1::2], strict=True)), quanta)
                self._say(order, wire.Answer.MOVED)
            case wire.Commit() if membership.pipeline is not None:
                await membership.pipeline.commit()
            case wire.Fill():
                from_others, from_backstop = await membership.fill(order)
                logger.info("parameters of %d layers came from other instances, of %d from the backstop",
                            from_others, from_backstop)  # fmt: skip
                self._say(order, wire.Answer.FILLED)
            case wire.Return():
                await self._return(membership, order, integers)
            case wire.Collect():
                await membership.collect(order, integers, self._note_copied(order, wire.Answer.COLLECTED))
            case wire.Close():
                await membership.close()
                self._retire_group()  # after the last beat that counts the group's engine
                self._membership = None
                self._say(order, wire.Answer.CLOSED)
            case _:
                raise InvariantError(f"{type(order).__name__} has no group to be carried out in")

    async def _prepare(self, membership: Membership) -> None:
        member, problem = self._member, self._member.backstop.check()
        records = [] if problem is not None else await membership.pause()
        if membership is not self._membership:  # cancelled meanwhile
            membership.cancel()
            return
        rows, blocks = await self._rows_of(records)
        memory, (host, port) = member.memory, member.listener.getsockname()[:2]
        prepared = wire.Prepared(
            epoch=self._session.epoch,
            number=membership.number,
            problem=problem,
            host=host,
            port=port,
            bulk_address=member.bulk.address,
            num_kv_pages=member.num_kv_pages,
            quantum_pages=memory.quantum_pages,
            param_pages=member.param_pages,
            quantum_blocks=memory.quantum_blocks,
            rows=tuple(rows),
        )
        if problem is not None:
            self._membership = membership.old
        self._session.send(prepared, blocks)

    async def _drop(self, membership: Membership, order: wire.Drop, integers: Sequence[int]) -> None:
        self._forget_streams()
        await membership.drop(order, integers, self._retire_group)
        self._session.engine = None if membership.pipeline is None else membership.pipeline.engine
        self._say(order, wire.Answer.DROPPED)

    async def _plan(self, membership: Membership, order: wire.Plan) -> None:
        if membership.pipeline is None:
            raise InvariantError("a group without a pipeline cannot shrink")
        plan, given_back = await membership.pipeline.plan(order.num_quanta)
        tickets = self._tickets_of(given_back)
        for ticket in tickets:
            self._session.streams[ticket].cancel()
        self._session.flush()
        flat = [block for move in plan.moves for block in move]
        self._session.send(
            wire.Planned(self._session.epoch, order.number, len(plan.moves), tuple(tickets)), [*flat, *plan.quanta]
        )

    async def _return(self, membership: Membership, order: wire.Return, used: Sequence[int]) -> None:
        records = await membership.leave_pipeline(used)
        rows, blocks = await self._rows_of(records)
        is_leader = membership.pipeline is not None and membership.pipeline.engine is not None
        self._forget_streams()
        self._session.engine = self._member.engine
        if is_leader:
            self._session.send(wire.HandedOver(self._session.epoch, order.number, tuple(rows)), blocks)
        else:
            self._say(order, wire.Answer.RETURNED)

    async def _rows_of(self, records: Sequence[Record]) -> tuple[list[wire.KvRow], list[int]]:
        """The rows of these records and the sources of their blocks. The router then has all their tokens."""
        tickets = {id(request): ticket for ticket, request in self._session.requests.items()}
        rows, sources = [], list[int]()
        for record in records:
            ticket = tickets.get(id(record.request))
            if ticket is not None and await self._session.wait_tokens(ticket, record.num_tokens):
                rows.append(wire.KvRow(ticket, record.num_tokens, record.num_computed, len(record.sources)))
                sources += record.sources
        self._session.flush()
        return rows, sources

    def _tickets_of(self, requests: Sequence[Request]) -> list[int]:
        wanted = {id(request) for request in requests}
        return [ticket for ticket, request in self._session.requests.items() if id(request) in wanted]

    def _forget_streams(self) -> None:
        for task in self._session.streams.values():
            task.cancel()

    def _retire_group(self) -> None:
        self.stats()
        self._counted.retire(_GROUP)

    def _note_copied(self, order: wire.Fetch | wire.Collect, answer: wire.Answer) -> Callable[[int, bool], None]:
        def note(request: int, is_whole: bool) -> None:
            self._session.send(wire.Copied(self._session.epoch, order.number, answer, request, is_whole))

        return note

    def _say(self, order: wire.GroupOrder, answer: wire.Answer) -> None:
        self._session.send(wire.GroupDone(self._session.epoch, order.number, answer))
