"""A pipeline in virtual time: the step loop of its leader, and stages with given times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from floodplain.core.plan import StepPlan
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.loop import Loop
from floodplain.sim.virtual_engine import dummy_result


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The result of a load.

    Attributes:
        span_s: From the first step to the last token.
        busy_s: Seconds of it that each stage computed.
        num_steps: Steps.
    """

    span_s: float
    busy_s: tuple[float, ...]
    num_steps: int

    @property
    def bubble(self) -> float:
        """The idle share of the stages' time."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.span_s)


def run_pipeline(loop: Loop, stage_times: Callable[[StepPlan], Sequence[float]]) -> PipelineRun:
    """Serve the requests of ``loop``, whose depth is the number of stages.

    As in the engine: the leader plans when its stage is free, computes, and waits only if it cannot plan more.

    Args:
        loop: The leader's loop.
        stage_times: Returns the seconds of a plan in each stage.
    """
    driver, now = StepDriver(loop), 0.0
    free_s = [0.0] * loop.state.config.depth
    busy_s = list(free_s)
    under_way: deque[tuple[float, StepPlan]] = deque()
    num_steps = 0
    while loop.has_unfinished:
        while driver.has_room and isinstance(plan := driver.next_plan(now), StepPlan):
            end_s = now
            for stage, duration_s in enumerate(stage_times(plan)):
                end_s = free_s[stage] = max(end_s, free_s[stage]) + duration_s
                busy_s[stage] += duration_s
            now = free_s[0]
            under_way.append((end_s, plan))
            num_steps += 1
        end_s, plan = under_way.popleft()
        now = max(now, end_s)
        driver.complete(dummy_result(plan), now)
    return PipelineRun(now, tuple(busy_s), num_steps)
