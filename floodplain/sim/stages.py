"""A pipeline of stages in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from floodplain.core.plan import StepPlan
from floodplain.core.request import Request, SeqId
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment
from floodplain.sim.links import VirtualLinks
from floodplain.sim.virtual_engine import VirtualEngine


class VirtualStages(VirtualEngine):
    """A loop whose depth is the number of stages, beside other events. It has no swap space.

    The leader plans when its stage is free; every stage runs one plan at a time.

    ``busy_s``: seconds that each stage computed. ``active_s``: seconds in which steps were outstanding, up to the last
    time when none was.
    """

    def __init__(
        self, environment: Environment, loop: Loop, stage_times: Callable[[StepPlan], Sequence[float]]
    ) -> None:
        super().__init__(environment, loop, VirtualLinks({}, 0))
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
