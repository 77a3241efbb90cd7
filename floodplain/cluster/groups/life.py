"""One life of an instance that may join groups: a ``Session`` executes the front's orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.groups.pipeline import GroupPipeline
from floodplain.cluster.groups.session import Session
from floodplain.cluster.instance.life import Life
from floodplain.cluster.sums import StatsBook, since
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.group_answers import Copied, GroupDone, HandedOver, KvRow, Planned, Prepared
from floodplain.cluster.wire.group_orders import (
    ORDERS,
    Adopt,
    Cancel,
    Close,
    Collect,
    Commit,
    Drop,
    Fetch,
    Fill,
    GroupOrder,
    Grow,
    Move,
    Plan,
    Prepare,
    Release,
    Return,
    Settle,
)
from floodplain.cluster.wire.group_steps import Answer
from floodplain.cluster.wire.messages import FrontMessage, Welcome
from floodplain.cluster.wire.order_checks import check_group_order
from floodplain.core.errors import InvariantError
from floodplain.core.request import Request
from floodplain.engine.outputs import EngineStats
from floodplain.engine.step_meter import StepMeter
from floodplain.runtime.handover import Record

logger = logging.getLogger(__name__)

_OWN, _GROUP = 0, 1


class GroupLife(Life):
    """A life that also executes group orders.

    Args:
        link: To the front.
        welcome: The front's answer to the hello.
        member: The engine and its memory for groups.
    """

    def __init__(self, link: FrameLink, welcome: Welcome, member: GroupMember) -> None:
        super().__init__(link, welcome, member.engine)
        self._member = member
        self._session: Session | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._counted = StatsBook()

    # -- failure, end, statistics --------------------------------------------------------------------------------------

    def find_failure(self) -> BaseException | None:
        """The failure of the engine, the group's pipeline, or an order; None if there is none."""
        in_group = None if self._pipeline is None else self._pipeline.failure
        return self._member.engine.failure or in_group or self._failed

    async def leave_group(self) -> None:
        """Leave any group, however the life ended: serve alone again, without requests.

        Raises:
            UserError: Dropped parameters cannot be read from the backstop.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.abandon()

    def _stats(self) -> EngineStats:
        """The sum of what the own engine and the group's engine counted."""
        self._counted.note(_OWN, since(self._member.engine.stats(), self._before))
        if self._pipeline is not None and self._pipeline.engine is not None:
            self._counted.note(_GROUP, self._pipeline.engine.stats())
        return self._counted.total()

    def _meter(self) -> StepMeter | None:
        return super()._meter() if self._pipeline is None else self._pipeline.meter

    @property
    def _pipeline(self) -> GroupPipeline | None:
        """The group's pipeline; the old group's while a group that takes it in is being prepared."""
        session = self._session
        if session is not None and session.old is not None:
            return session.old.pipeline
        return None if session is None else session.pipeline

    # -- orders --------------------------------------------------------------------------------------------------------

    def _take(self, message: FrontMessage, token_ids: tuple[int, ...]) -> None:
        if not isinstance(message, ORDERS):
            super()._take(message, token_ids)
        elif message.epoch == self._epoch:
            taken = self._streams.get(message.submit.ticket) if isinstance(message, Adopt) else None
            check_group_order(message, token_ids, taken, len(self._member.param_pages))
            self._obey(message, token_ids)

    def _obey(self, order: GroupOrder, integers: tuple[int, ...]) -> None:
        if isinstance(order, Prepare) and (self._session is None or self._session.pipeline is not None):
            self._session = Session(self._member, order.number, self._session)
        session = self._session
        if session is None or session.number != order.number:
            return
        match order:
            case Cancel():
                session.cancel()
                self._session = session.old
            case Adopt():
                self._begin(order.submit, integers, session.adopter(order.request, order.num_computed))
                stream = self._streams[order.submit.ticket]
                stream.add_done_callback(lambda _: session.release(order.request))  # in case it ended before it ran
            case Release():
                session.release(order.request)
            case Grow() if session.pipeline is not None:
                session.pipeline.grow(order.num_quanta)
            case _:
                self._start(self._carry_out(session, order, integers))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()

    async def _carry_out(self, session: Session, order: GroupOrder, integers: tuple[int, ...]) -> None:
        """Execute one order that takes time. The front sends the next one when all members have answered."""
        match order:
            case Prepare():
                await self._prepare(session)
            case Drop():
                await self._drop(session, order, integers)
            case Fetch():
                await session.fetch(order, integers, self._note_copied(order, Answer.FETCHED))
            case Settle():
                await session.settle(order.num_quanta)
                self._say(order, Answer.SETTLED)
            case Plan():
                await self._plan(session, order)
            case Move():
                flat, quanta = integers[: 2 * order.num_moves], integers[2 * order.num_moves :]
                await session.move(list(zip(flat[::2], flat[1::2], strict=True)), quanta)
                self._say(order, Answer.MOVED)
            case Commit() if session.pipeline is not None:
                await session.pipeline.commit()
            case Fill():
                from_others, from_backstop = await session.fill(order)
                logger.info("parameters of %d layers came from other instances, of %d from the backstop",
                            from_others, from_backstop)  # fmt: skip
                self._say(order, Answer.FILLED)
            case Return():
                await self._return(session, order, integers)
            case Collect():
                await session.collect(order, integers, self._note_copied(order, Answer.COLLECTED))
            case Close():
                await session.close()
                self._retire_group()  # after the last beat that counts the group's engine
                self._session = None
                self._say(order, Answer.CLOSED)
            case _:
                raise InvariantError(f"{type(order).__name__} has no group to be carried out in")

    async def _prepare(self, session: Session) -> None:
        member, problem = self._member, self._member.find_problem()
        records = [] if problem is not None else await session.pause()
        if session is not self._session:  # cancelled meanwhile
            session.cancel()
            return
        rows, blocks = await self._rows_of(records)
        memory, (host, port) = member.memory, member.listener.getsockname()[:2]
        prepared = Prepared(
            epoch=self._epoch,
            number=session.number,
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
            self._session = session.old
        self._send(prepared, blocks)

    async def _drop(self, session: Session, order: Drop, integers: Sequence[int]) -> None:
        self._forget_streams()
        await session.drop(order, integers, self._retire_group)
        self._engine = None if session.pipeline is None else session.pipeline.engine
        self._say(order, Answer.DROPPED)

    async def _plan(self, session: Session, order: Plan) -> None:
        if session.pipeline is None:
            raise InvariantError("a group without a pipeline cannot shrink")
        plan, given_back = await session.pipeline.plan(order.num_quanta)
        tickets = self._tickets_of(given_back)
        for ticket in tickets:
            self._streams[ticket].cancel()
        self._flush()
        flat = [block for move in plan.moves for block in move]
        self._send(Planned(self._epoch, order.number, len(plan.moves), tuple(tickets)), [*flat, *plan.quanta])

    async def _return(self, session: Session, order: Return, used: Sequence[int]) -> None:
        records = await session.leave_pipeline(used)
        rows, blocks = await self._rows_of(records)
        is_leader = session.pipeline is not None and session.pipeline.engine is not None
        self._forget_streams()
        self._engine = self._member.engine
        if is_leader:
            self._send(HandedOver(self._epoch, order.number, tuple(rows)), blocks)
        else:
            self._say(order, Answer.RETURNED)

    # -- rows ----------------------------------------------------------------------------------------------------------

    async def _rows_of(self, records: Sequence[Record]) -> tuple[list[KvRow], list[int]]:
        """The rows of these records and the sources of their blocks. The front then has all their tokens."""
        tickets = {id(request): ticket for ticket, request in self._requests.items()}
        rows, sources = [], list[int]()
        for record in records:
            ticket = tickets.get(id(record.request))
            while ticket in self._num_known and self._num_known[ticket] < record.num_tokens:
                await asyncio.sleep(0)  # its stream is about to run
            if ticket is not None and ticket in self._num_known:
                rows.append(KvRow(ticket, record.num_tokens, record.num_computed, len(record.sources)))
                sources += record.sources
        self._flush()
        return rows, sources

    def _tickets_of(self, requests: Sequence[Request]) -> list[int]:
        wanted = {id(request) for request in requests}
        return [ticket for ticket, request in self._requests.items() if id(request) in wanted]

    def _forget_streams(self) -> None:
        """Cancel all streams; the front takes their requests back."""
        for task in self._streams.values():
            task.cancel()

    def _retire_group(self) -> None:
        self._stats()
        self._counted.retire(_GROUP)

    def _note_copied(self, order: Fetch | Collect, answer: Answer) -> Callable[[int, bool], None]:
        def note(request: int, is_whole: bool) -> None:
            self._send(Copied(self._epoch, order.number, answer, request, is_whole))

        return note

    def _say(self, order: GroupOrder, answer: Answer) -> None:
        self._send(GroupDone(self._epoch, order.number, answer))
