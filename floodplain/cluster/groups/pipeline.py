"""A member's part of a group's pipeline: the leader runs the step loop, the others a thread with their layers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.pipeline.stage import PipelineStage, plan_limits
from floodplain.cluster.wire.group_messages import Drop
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.shrink import ShrinkPlan, commit_shrink, plan_shrink
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape
from floodplain.engine.async_engine import AsyncEngine, Pause
from floodplain.engine.shell import Engine
from floodplain.engine.step_meter import StepMeter
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.handover import HeldBlocks, Record, adopt, take_records


class GroupPipeline:
    """A member's part of a group's pipeline. Everything is called on one event loop.

    Args:
        member: The group member; its group memory has the KV.
        blocks: For the leader: blocks of the requests whose KV is being copied, one request after the other.

    Attributes:
        is_ending: Whether the end of a neighbour's link is expected, and so not a failure.
    """

    def __init__(self, member: GroupMember, order: Drop, blocks: Sequence[int]) -> None:
        self.is_ending = False
        self._member, self._order, self._blocks = member, order, blocks
        kept = range(order.first_layer, order.end_layer)
        self._parts = replace(member.parts, model=member.parts.model.part(kept))
        self._limits = plan_limits(self._parts, self._count_blocks(order.num_quanta), order.max_model_len)
        rule, busy = MicrobatchRule("even", ChunkPrice(cost_by_shape(self._parts.shape))), member.gate.busy
        place, num_members = order.place, order.num_members
        self._stage = PipelineStage(self._parts, member.listener, order, place, num_members, self._limits, rule, busy)
        self._held: HeldBlocks | None = None
        self._pause: Pause | None = None
        self._shrink: ShrinkPlan | None = None

    @property
    def engine(self) -> AsyncEngine | None:
        """The leader's engine; None in other members."""
        return self._stage.engine

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the pipeline; None if there is none."""
        return None if self.is_ending and self.engine is None else self._stage.failure

    @property
    def meter(self) -> StepMeter | None:
        """The step meter of this member's part; None before it computes."""
        return self._stage.meter

    async def open(self) -> None:
        """Link with both neighbours, and start to compute. Raises ``PeerLost`` if a neighbour cannot be reached."""
        make_runner = partial(self._parts.make_runner, self._member.memory.layers, self._order.max_model_len)
        await self._stage.open(make_runner, self._make_ledger, self._note_held)

    def limit(self, num_quanta: int) -> None:
        """Let plans name blocks of ``num_quanta`` quanta from now on."""
        self._limits = replace(self._limits, num_blocks=self._count_blocks(num_quanta))
        if self._stage.worker is not None:
            self._stage.worker.limits = self._limits

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
            if not adopt(engine.loop, seq_id, blocks, num_computed, engine.clock()):
                engine.loop.state.ledger.free(blocks)

        return take

    def release(self, request: int) -> None:
        """Free the blocks held for a request: it ended, or is recomputed."""

        def drop(engine: Engine) -> None:
            self._expect_held().drop(request)
            self._note_held(engine)

        self._expect_engine().post(drop)

    async def plan(self, num_quanta: int) -> tuple[ShrinkPlan, list[Request]]:
        """Drain the pipeline, and plan to shrink it; it stays paused until ``commit``.

        Returns the plan, and the youngest requests, which no longer fit: they were aborted here.
        """
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
        if self._stage.worker is not None:
            await asyncio.to_thread(self._stage.worker.close)
        return records

    async def close(self) -> None:
        """Close the links, the thread and the engine. Safe to call twice."""
        self.is_ending = True
        await self._stage.close()

    def _note_held(self, engine: Engine) -> None:
        """Tell the loop how many blocks are held: requests may wait for them while nothing else runs."""
        engine.loop.state.num_returning_blocks = self._expect_held().num_blocks

    def _count_blocks(self, num_quanta: int) -> int:
        return num_quanta * self._member.memory.quantum_blocks

    def _make_ledger(self) -> BlockLedger:
        config, quantum_blocks = self._parts.config, self._member.memory.quantum_blocks
        ledger = BlockLedger(
            self._count_blocks(self._order.num_quanta),
            config.block_tokens,
            quantum_blocks=quantum_blocks,
            caches_prefixes=config.enable_prefix_caching,
        )
        self._held = HeldBlocks(ledger, self._split_blocks())
        return ledger

    def _split_blocks(self) -> dict[int, list[BlockId]]:
        rows, start = {}, 0
        for held in self._order.held:
            rows[held.request] = [BlockId(block) for block in self._blocks[start : start + held.num_blocks]]
            start += held.num_blocks
        return rows

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
