"""A pipeline of stages in virtual time, and a model whose equal instances can form one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request, SeqId
from floodplain.cost.pipeline import ChunkPrice
from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.policy.drop import DropSizes
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.virtual_engine import VirtualEngine


class VirtualStages(VirtualEngine):
    """A loop whose depth is the number of stages, beside other events. It has no swap space.

    The leader plans when its stage is free; every stage runs one plan at a time.

    Attributes:
        busy_s: Seconds that each stage computed.
        active_s: Seconds in which steps were outstanding, up to the last time when none was.
    """

    def __init__(
        self, environment: Environment, loop: Loop, stage_times: Callable[[StepPlan], Sequence[float]]
    ) -> None:
        super().__init__(environment, loop)
        self.busy_s = [0.0] * loop.state.config.depth
        self.active_s = 0.0
        self._stage_times = stage_times
        self._free_s = [environment.now] * len(self.busy_s)
        self._on_paused: Callable[[], object] | None = None
        self._active_since_s = 0.0

    def arrive(self, request: Request, then: Callable[[SeqId], object]) -> None:
        """As the base class: at once, since the leader plans at any time."""
        then(self._take(request))
        self.advance()

    def pause(self, then: Callable[[], object]) -> None:
        """As the base class."""
        self._on_paused = then
        self._tell_if_paused()

    def advance(self) -> None:
        """Start all steps that can start now."""
        now = self._environment.now
        while self._on_paused is None and self._driver.has_room and self._free_s[0] <= now:
            plan = self._driver.next_plan(now)
            if not isinstance(plan, StepPlan):
                return
            if self.on_step is not None:
                self.on_step(plan, now)
            if self._driver.num_outstanding == 1:
                self._active_since_s = now
            end_s = now
            for stage, duration_s in enumerate(self._stage_times(plan)):
                end_s = self._free_s[stage] = max(end_s, self._free_s[stage]) + duration_s
                self.busy_s[stage] += duration_s
            self._environment.schedule(end_s, partial(self._end_step, plan))
            self._environment.schedule(self._free_s[0], self.advance)

    def _end_step(self, plan: StepPlan) -> None:
        self._complete(plan)
        if not self._driver.num_outstanding:
            self.active_s += self._environment.now - self._active_since_s
        self._tell_if_paused()
        self.advance()

    def _tell_if_paused(self) -> None:
        if self._on_paused is not None and not self._driver.num_outstanding:
            self._on_paused()


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualModel:
    """A model on equal instances.

    Attributes:
        cost: Cost of a step through all layers.
        sizes: Sizes of layers and blocks.
        num_blocks: KV pool of an instance that has all layers.
        block_tokens: Tokens in a block.
        config: Limits of an instance's loop.
        hop_s: Seconds from one stage to the next.
        least_tokens: As in ``MicrobatchRule``.
        head_cost: As ``sim.regrouping.GroupModel``; the stages of a group cost the same.
    """

    cost: StepCost
    sizes: DropSizes
    num_blocks: int
    block_tokens: int
    config: LoopConfig
    hop_s: float = 0.0
    least_tokens: int = 256
    head_cost: float = 0.0

    def make_single(self, environment: Environment) -> VirtualStages:
        """An instance with all layers."""
        return self.make_stages(environment, 1, self.num_blocks)

    def make_group(self, environment: Environment, kept: Sequence[range], num_blocks: int) -> VirtualStages:
        """A pipeline of so many members."""
        return self.make_stages(environment, len(kept), num_blocks)

    def make_stages(self, environment: Environment, num_stages: int, num_blocks: int) -> VirtualStages:
        """An instance (one stage), or a pipeline of equally expensive stages, with FCFS."""
        config = replace(self.config, depth=num_stages, max_num_seqs=num_stages * self.config.max_num_seqs)
        policy = FcfsPolicy(microbatches=MicrobatchRule("even", ChunkPrice(self.cost), self.least_tokens))
        ledger = BlockLedger(num_blocks, self.block_tokens, caches_prefixes=False)
        timer = StepTimer(self.cost)
        hop_s = self.hop_s if num_stages > 1 else 0.0

        def stage_times(plan: StepPlan) -> list[float]:
            return [timer.time_s(plan) / num_stages + hop_s] * num_stages

        return VirtualStages(environment, Loop(LoopState(config, ledger, policy), policy), stage_times)
