"""An instance or a pipeline in virtual time: a step loop over stages, which can be paused and replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from floodplain.core.free_blocks import BlockId
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request, SeqId
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.handover import adopt
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment
from floodplain.sim.executor import DUMMY_TOKEN


class VirtualStages:
    """A loop whose depth is the number of stages, as in ``sim.pipeline``, beside other events. It has no swap space.

    The leader plans when its stage is free; every stage runs one plan at a time.

    Attributes:
        loop: The step loop of the leader.
        lifecycles: Lifecycles of all requests, in order of submission.
        busy_s: Seconds that each stage computed.
    """

    def __init__(
        self, environment: Environment, loop: Loop, stage_times: Callable[[StepPlan], Sequence[float]]
    ) -> None:
        self.loop = loop
        self.lifecycles: dict[SeqId, Lifecycle] = {}
        self.busy_s = [0.0] * loop.state.config.depth
        self._environment = environment
        self._stage_times = stage_times
        self._driver = StepDriver(loop)
        self._free_s = [environment.now] * len(self.busy_s)
        self._on_paused: Callable[[], object] | None = None

    def submit(self, request: Request) -> SeqId:
        """Submit a request that arrives now and computes all of its known tokens."""
        seq_id = self._take_in(request)
        self.advance()
        return seq_id

    def adopt(self, request: Request, blocks: Sequence[BlockId], num_computed: int) -> SeqId:
        """Resume a request from KV in ``blocks``, which were held for it; if it may not run, it is recomputed."""
        seq_id = self._take_in(request)
        if not adopt(self.loop, seq_id, blocks, num_computed, self._environment.now):
            self.loop.state.ledger.free(blocks)
        self.advance()
        return seq_id

    def pause(self, then: Callable[[], object]) -> None:
        """Stop planning for good, and call ``then`` when no step is outstanding."""
        self._on_paused = then
        self._tell_if_paused()

    def advance(self) -> None:
        """Start all steps that can start now."""
        now = self._environment.now
        while self._on_paused is None and self._driver.has_room and self._free_s[0] <= now:
            plan = self._driver.next_plan(now)
            if not isinstance(plan, StepPlan):
                return
            end_s = now
            for stage, duration_s in enumerate(self._stage_times(plan)):
                end_s = self._free_s[stage] = max(end_s, self._free_s[stage]) + duration_s
                self.busy_s[stage] += duration_s
            self._environment.schedule(end_s, partial(self._complete, plan))
            self._environment.schedule(self._free_s[0], self.advance)

    def _take_in(self, request: Request) -> SeqId:
        seq_id = self.loop.submit(request)
        self.lifecycles[seq_id] = self.loop.state.sequences[seq_id].lifecycle
        return seq_id

    def _complete(self, plan: StepPlan) -> None:
        result = StepResult(plan.step_id, [DUMMY_TOKEN] * len(plan.sampled))
        self._driver.complete(result, self._environment.now)
        self._tell_if_paused()
        self.advance()

    def _tell_if_paused(self) -> None:
        if self._on_paused is not None and not self._driver.num_outstanding:
            self._on_paused()
