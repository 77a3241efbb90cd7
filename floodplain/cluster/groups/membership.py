"""A member's side of one group, from the pause to the return of the last page. It executes the router's orders.

Until ``drop`` nothing is unmapped, and ``cancel`` resumes the engine. From then on the member has only some layers,
until ``close``, or ``abandon`` if the group fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from floodplain.cluster.bulk.kv_copies import (
    KV,
    PARAMETERS,
    SWAP,
    KvStore,
    Puller,
    RequestCopy,
    copy_own,
    copy_slots,
    group_layers,
    write_pool,
)
from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.pipeline.stage import PipelineStage, plan_limits
from floodplain.cluster.wire.group_messages import Collect, Drop, Fetch, Fill, split_blocks
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.shrink import ShrinkPlan, commit_shrink, plan_shrink
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape
from floodplain.engine.async_engine import AsyncEngine, Pause
from floodplain.engine.shell import Engine
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.handover import HeldBlocks, Incoming, Record, adopt, take_records

T = TypeVar("T")


class Membership:
    """A member's side of one group. Everything is called on one event loop, one order after the other.

    ``old`` is the membership of a group that is taken in, in place of an engine: it resumes at ``cancel``, and ends at
    ``drop``. None if the member serves alone.
    """

    def __init__(self, member: GroupMember, number: int, old: Membership | None = None) -> None:
        self.number, self.old = number, old
        self.pipeline: GroupPipeline | None = None
        self._member = member
        self._pause: Pause | None = None
        self._puller: Puller | None = None
        self._secret = b""
        self._threads: set[asyncio.Future[Any]] = set()
        self._loading: dict[int, Incoming] = {}  # by request: blocks of the own pool that KV is collected into

    # -- in -------------------------------------------------------------------------------------------------------

    async def pause(self) -> list[Record]:
        """Pause the engine, or the old group's pipeline, at a step boundary. Records of its requests."""
        if self.old is not None:
            return await self.old._expect_pipeline().hold()
        self._pause = await self._member.engine.pause()
        return await self._pause.run(lambda engine: take_records(engine.loop))

    def cancel(self) -> None:
        """Resume what was paused."""
        if self.old is not None:
            self.old._expect_pipeline().go_on()
        if self._pause is not None:
            self._pause.release()
            self._pause = None

    async def drop(self, order: Drop, integers: Sequence[int], on_left: Callable[[], None]) -> None:
        """Unmap all layers but some, link with the neighbours, and compute as a stage.

        ``on_left`` is called when the pipeline of the old group, if any, has ended. ``PeerLost`` if one does not link.
        """
        member, self._secret = self._member, bytes.fromhex(order.secret)
        self._puller = Puller(self._secret)
        await self._in_thread(member.bulk.withdraw, PARAMETERS)
        used = tuple(integers[: order.num_used])
        if self.old is not None:
            await self._take_over(self.old, order, used, on_left)
        elif self._pause is not None:
            await self._pause.run(partial(self._unmap, order, used))
            self.cancel()
        else:
            raise InvariantError("layers are to be dropped, and the engine is not paused")
        member.bulk.admit(self._secret)
        member.bulk.serve(KV, KvStore(member.memory), member.pool.layout.layer_block_bytes)
        member.serve_swap()
        member.serve_parameters()
        self.pipeline = GroupPipeline(member, order, integers[order.num_used :])
        await self.pipeline.start()

    def _unmap(self, order: Drop, used: tuple[int, ...], engine: Engine) -> None:
        """Abort the paused engine's requests, which the router has lifted, and unmap; their KV stays in its pages."""
        pool, memory, ledger = self._member.pool, self._member.memory, engine.loop.state.ledger
        for seq_id in list(engine.loop.state.sequences):
            engine.finish(seq_id, FinishReason.ABORT)
        quanta, engine.loop.state.num_returning_blocks = pool.quanta, pool.num_blocks
        pages = pool.shrink(ledger, 0).pages
        kept = range(order.first_layer, order.end_layer)
        try:
            memory.drop(pages, quanta, used, kept, order.first_quantum, order.num_quanta)
        except BaseException:
            pool.grow(ledger, len(quanta) * pool.quantum_blocks, pages)
            raise

    async def _take_over(
        self, old: Membership, order: Drop, used: tuple[int, ...], on_left: Callable[[], None]
    ) -> None:
        """End the old group; its KV stays in its pages."""
        await old._end()
        on_left()
        self.old = None
        kept = range(order.first_layer, order.end_layer)
        memory = self._member.memory
        await self._in_thread(memory.drop_more, used, kept, order.first_quantum, order.num_quanta)

    # -- KV arrives -----------------------------------------------------------------------------------------------

    async def fetch(self, order: Fetch, integers: Sequence[int], on_copied: Callable[[int, bool], None]) -> None:
        """Copy the kept layers of requests from the members that have them, and from the own swap space."""
        memory, half = self._member.memory, len(integers) // 2  # blocks by the group's ids, then their sources
        blocks = [split_blocks(order.held, integers[:half]), split_blocks(order.held, integers[half:])]
        for (held, targets), (_, sources) in zip(*blocks, strict=True):
            places = order.sources[held.place]
            layers = group_layers(memory.kept, lambda layer, places=places: order.addresses[places[layer]])  # type: ignore[misc]
            one = RequestCopy(sources, targets, layers)
            is_own = self._member.bulk.address in layers
            copy = partial(copy_slots, self._member.swap, memory.kept) if is_own else self._expect_puller().copy
            on_copied(held.request, await self._in_thread(copy, one, memory.write))

    async def collect(self, order: Collect, blocks: Sequence[int], on_copied: Callable[[int, bool], None]) -> None:
        """Copy KV of requests, in all layers, into blocks of the own pool."""
        for held, sources in split_blocks(order.held, blocks):
            targets = await self._run(partial(self._begin_load, held.request, len(sources)))
            layers = group_layers(range(len(order.addresses)), order.addresses.__getitem__)
            is_whole = targets is not None and await self._in_thread(
                self._collect_one, RequestCopy(sources, tuple(targets), layers)
            )
            on_copied(held.request, is_whole)

    def _collect_one(self, one: RequestCopy) -> bool:
        write, own = write_pool(self._member.pool), self._member.bulk.address
        others = {address: layers for address, layers in one.layers.items() if address != own}
        is_own_here = copy_own(self._member.memory, one, one.layers.get(own, ()), write)
        return is_own_here and self._expect_puller().copy(replace(one, layers=others), write)

    def adopter(self, request: int, num_computed: int) -> Callable[[Engine, SeqId], None]:
        """A callback for the engine that resumes a request: it gives the waiting request its blocks."""
        if request in self._loading:
            return partial(self._adopt_loaded, request, num_computed)
        return self._expect_pipeline().adopter(request, num_computed)

    def release(self, request: int) -> None:
        """Free the blocks reserved for a request that ended or is recomputed; no effect if it was adopted."""
        if request in self._loading:
            self._member.engine.post(partial(self._abort_load, request))
        elif self.pipeline is not None and self.pipeline.engine is not None:
            self.pipeline.release(request)

    # -- while grouped --------------------------------------------------------------------------------------------

    async def settle(self, num_quanta: int) -> None:
        """Unmap KV of dropped layers, and map more quanta; swap space is no longer served."""
        await self._in_thread(self._member.bulk.withdraw, SWAP)
        if await self._in_thread(self._member.memory.settle, num_quanta) is None:
            raise InvariantError(f"a group's member cannot have {num_quanta} quanta")
        self._expect_pipeline().limit(num_quanta)

    async def move(self, moves: Sequence[tuple[int, int]], quanta: Sequence[int]) -> None:
        """Move blocks and unmap quanta; no step is under way."""
        await self._in_thread(self._member.memory.shrink, moves, quanta)

    async def fill(self, order: Fill) -> tuple[int, int]:
        """Map and fill parameters of dropped layers. (number from other members, number from the backstop)"""
        counts = await self._in_thread(self._member.fill, self._expect_puller(), order.addresses)
        self._expect_pipeline().is_ending = True  # a neighbour that returns earlier closes its link
        return counts

    # -- out ------------------------------------------------------------------------------------------------------

    async def leave_pipeline(self, used: Sequence[int]) -> list[Record]:
        """Leave the pipeline, and return spare memory to the own pool. The leader's records; others' are empty.

        ``used`` are quanta with KV of requests; the leader derives them from its records.
        """
        pipeline = self._expect_pipeline()
        records = await pipeline.leave()
        await self._in_thread(self._unmap_unused, used if pipeline.engine is None else None, records)
        await self._run(self._grow)
        return records

    def _unmap_unused(self, used: Sequence[int] | None, records: Sequence[Record]) -> None:
        memory = self._member.memory
        if used is None:
            used = [block // memory.quantum_blocks for record in records for block in record.sources]
        memory.shrink((), sorted({*memory.quanta} - {*used}))

    async def close(self) -> None:
        """Return all pages to the own pool."""
        await self._end()
        await self._run(lambda engine: self._member.grow(engine, self._member.memory.close_group()))

    async def abandon(self) -> None:
        """Leave a failed group: serve alone, without requests. ``UserError`` if the backstop cannot be read."""
        self.cancel()
        if self.old is not None:
            await self.old.abandon()
        elif self._puller is not None:
            await self._end()
            await self._run(self._repair)

    async def _end(self) -> None:
        self._expect_puller().close()
        await asyncio.gather(*self._threads, return_exceptions=True)
        if self.pipeline is not None:
            await self.pipeline.close()
        await self._in_thread(self._member.bulk.withdraw, KV)
        await self._in_thread(self._member.bulk.withdraw, SWAP)
        self._member.bulk.revoke(self._secret)

    def _repair(self, engine: Engine) -> None:
        for request in list(self._loading):
            self._abort_load(request, engine)
        self._member.grow(engine, self._member.memory.abandon())
        self._member.fill_from_backstop()
        self._member.bulk.withdraw(PARAMETERS)
        self._member.serve_parameters()

    def _grow(self, engine: Engine) -> None:
        memory = self._member.memory
        quantum_pages = memory.quantum_pages * self._member.pool.layout.num_layers
        pages = memory.take_spare(memory.num_spare_pages // quantum_pages * quantum_pages)
        if pages is None:
            raise InvariantError("spare pages of a group are gone")
        self._member.grow(engine, pages)

    # -- on the engine's thread: blocks that KV is collected into -------------------------------------------------

    def _begin_load(self, request: int, num_blocks: int, engine: Engine) -> Sequence[BlockId] | None:
        incoming = Incoming(engine.loop)
        blocks = incoming.reserve(num_blocks)
        if blocks is not None:
            self._loading[request] = incoming
        return blocks

    def _adopt_loaded(self, request: int, num_computed: int, engine: Engine, seq_id: SeqId) -> None:
        self._loading.pop(request).adopt(seq_id, num_computed, engine.clock())

    def _abort_load(self, request: int, _: Engine) -> None:
        incoming = self._loading.pop(request, None)
        if incoming is not None:
            incoming.release()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _run(self, function: Callable[[Engine], T]) -> T:
        pause = await self._member.engine.pause()
        try:
            return await pause.run(function)
        finally:
            pause.release()

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Like ``asyncio.to_thread``, but ``abandon`` waits for it even if this call is cancelled."""
        future = asyncio.ensure_future(asyncio.to_thread(function, *args))
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        return await asyncio.shield(future)

    def _expect_puller(self) -> Puller:
        if self._puller is None:
            raise InvariantError("KV is to be copied, and nothing was dropped")
        return self._puller

    def _expect_pipeline(self) -> GroupPipeline:
        if self.pipeline is None:
            raise InvariantError("a group's pipeline is not there")
        return self.pipeline


class GroupPipeline(PipelineStage):
    """A member's part of a group's pipeline: the leader runs the step loop, the others a thread with their layers.

    Everything is called on one event loop. The leader's ``blocks`` are those of requests whose KV is being copied, one
    request after the other. While ``is_ending``, the end of a neighbour's link is no failure.
    """

    def __init__(self, member: GroupMember, order: Drop, blocks: Sequence[int]) -> None:
        self.is_ending = False
        self._memory, self._order, self._blocks = member.memory, order, blocks
        parts = replace(member.parts, model=member.parts.model.part(range(order.first_layer, order.end_layer)))
        limits = plan_limits(parts, self._count_blocks(order.num_quanta), order.max_model_len)
        rule = MicrobatchRule("even", ChunkPrice(cost_by_shape(parts.shape)))
        super().__init__(parts, member.listener, order, order.place, order.num_members, limits, rule, member.gate.busy)
        self._held: HeldBlocks | None = None
        self._pause: Pause | None = None
        self._shrink: ShrinkPlan | None = None

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the pipeline; None if there is none."""
        return None if self.is_ending and self.engine is None else super().failure

    async def start(self) -> None:
        """Link with both neighbours, and start to compute. Raises ``PeerLost`` if a neighbour cannot be reached."""
        make_runner = partial(self._parts.make_runner, self._memory.layers, self._order.max_model_len)
        await self.open(make_runner, self._make_ledger, self._note_held)

    def limit(self, num_quanta: int) -> None:
        """Let plans name blocks of ``num_quanta`` quanta from now on."""
        self._limits = replace(self._limits, num_blocks=self._count_blocks(num_quanta))
        if self.worker is not None:
            self.worker.limits = self._limits

    # -- of the leader -------------------------------------------------------------------------------------------------

    def grow(self, num_quanta: int) -> None:
        """Add blocks to the ledger, up to ``num_quanta`` quanta, which all members have."""
        end = self._count_blocks(num_quanta)

        def add(engine: Engine) -> None:
            ledger = engine.loop.state.ledger
            ledger.add_memory(range(ledger.num_indexed_blocks, end))

        self._expect_engine().post(add)

    def adopter(self, request: int, num_computed: int) -> Callable[[Engine, SeqId], None]:
        """A callback that lets a waiting request run from the blocks that are held for it."""

        def take(engine: Engine, seq_id: SeqId) -> None:
            blocks = self._expect_held().take(request)
            self._note_held(engine)
            adopt(engine.loop, seq_id, blocks, num_computed, engine.clock())

        return take

    def release(self, request: int) -> None:
        """Free the blocks held for a request: it ended, or is recomputed."""

        def drop(engine: Engine) -> None:
            self._expect_held().drop(request)
            self._note_held(engine)

        self._expect_engine().post(drop)

    async def plan(self, num_quanta: int) -> tuple[ShrinkPlan, list[Request]]:
        """Drain the pipeline until ``commit``. The plan of its shrink, and the youngest requests, which are aborted."""
        self._pause = await self._expect_engine().pause()
        plan, given_back = await self._pause.run(partial(_plan, self._count_blocks(num_quanta)))
        self._shrink = plan
        return plan, given_back

    async def commit(self) -> None:
        """Commit the planned shrink, and resume; all members have moved their blocks."""
        if self._pause is None or self._shrink is None:
            raise InvariantError("a shrink is committed that was not planned")
        await self._pause.run(partial(_commit, self._shrink))
        self._pause.release()
        self._pause = self._shrink = None

    # -- the end -----------------------------------------------------------------------------------------------------

    async def hold(self) -> list[Record]:
        """Pause. The leader's records; empty for other members. ``go_on`` resumes."""
        self.is_ending = True
        if self.engine is None:
            return []
        self._pause = await self.engine.pause()
        return await self._pause.run(lambda engine: take_records(engine.loop))

    def go_on(self) -> None:
        """Resume after ``hold``."""
        self.is_ending = False
        if self._pause is not None:
            self._pause.release()
            self._pause = None

    async def leave(self) -> list[Record]:
        """Stop computing. The leader's records (its links stay open until ``close``); empty for other members."""
        records = await self.hold()
        if self.worker is not None:
            await asyncio.to_thread(self.worker.close)
        return records

    async def close(self) -> None:
        """Close the links, the thread and the engine. Safe to call twice."""
        self.is_ending = True
        await super().close()

    def _note_held(self, engine: Engine) -> None:
        """Tell the loop how many blocks are held: requests may wait for them while nothing else runs."""
        engine.loop.state.num_returning_blocks = self._expect_held().num_blocks

    def _count_blocks(self, num_quanta: int) -> int:
        return num_quanta * self._memory.quantum_blocks

    def _make_ledger(self) -> BlockLedger:
        config, quantum_blocks = self._parts.config, self._memory.quantum_blocks
        ledger = BlockLedger(
            self._count_blocks(self._order.num_quanta),
            config.block_tokens,
            quantum_blocks=quantum_blocks,
            caches_prefixes=config.enable_prefix_caching,
        )
        rows = split_blocks(self._order.held, self._blocks)
        self._held = HeldBlocks(ledger, {held.request: list(map(BlockId, blocks)) for held, blocks in rows})
        return ledger

    def _expect_engine(self) -> AsyncEngine:
        if self.engine is None:
            raise InvariantError("only the leader of a group has a step loop")
        return self.engine

    def _expect_held(self) -> HeldBlocks:
        if self._held is None:
            raise InvariantError("only the leader of a group holds blocks")
        return self._held


def _plan(num_blocks: int, engine: Engine) -> tuple[ShrinkPlan, list[Request]]:
    state, given_back = engine.loop.state, []
    for seq in sorted(state.sequences.values(), key=lambda one: one.order_key, reverse=True):
        if state.ledger.num_blocks - state.ledger.num_available <= num_blocks:
            break
        given_back.append(seq.request)
        engine.finish(seq.seq_id, FinishReason.ABORT)
    plan = plan_shrink(state.ledger, num_blocks)
    if plan.num_blocks > num_blocks:
        raise InvariantError(f"a group shrinks to {plan.num_blocks} blocks, and not to {num_blocks}")
    return plan, given_back


def _commit(plan: ShrinkPlan, engine: Engine) -> None:
    engine.loop.remap_blocks(commit_shrink(engine.loop.state.ledger, plan))
