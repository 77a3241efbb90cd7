"""Drives a step loop for the engine's shell and for the simulator. Pure: times are arguments.

    plan = driver.next_plan(now)             a StepPlan to execute, or Wait
    outputs = driver.complete(result, now)   the result of the oldest outstanding step
    driver.settle(ended, take_times, now)    copies have ended, at a boundary

While ``next_plan`` returns Wait the caller calls ``note_wait``, and then ``end_wait``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from floodplain.core.plan import StepOutputs, StepPlan, StepResult, Wait
from floodplain.core.tiers import CopyTime
from floodplain.runtime.loop import Loop


class StepDriver:
    """A loop, its outstanding steps and copies, and seconds in which requests could not run before a copy ended."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.num_outstanding = 0
        self.num_copying = 0
        self.stall_s = 0.0
        self._stalled_since_s: float | None = None

    def next_plan(self, now: float) -> StepPlan | Wait:
        """Plan one more step (``Loop.next_plan``). The plan's transfers count as in flight from now on."""
        plan = self.loop.next_plan(now)
        if isinstance(plan, StepPlan):
            self.num_outstanding += 1
            self.num_copying += len(plan.transfers)
        return plan

    @property
    def has_room(self) -> bool:
        """Whether one more step may be outstanding."""
        return self.num_outstanding < self.loop.state.config.depth

    def complete(self, result: StepResult, now: float) -> StepOutputs:
        """Take in the result of the oldest outstanding step; InvariantError if the result is not that step's."""
        self.num_outstanding -= 1
        return self.loop.complete(result, now)

    def settle(
        self, ended: Seq[tuple[int, Seq[int]]], take_times: Callable[[], Iterable[CopyTime]], now: float
    ) -> None:
        """Settle copies that ended, and update link prices from their times.

        ``ended`` has (transfer id, places in ``Transfer.blocks`` of the blocks that were not proven whole).
        ``take_times`` is called only if a copy ended, and returns the copy times since its last call.
        """
        self.num_copying -= len(ended)
        for transfer_id, lost in ended:
            self.loop.transfer_done(transfer_id, lost, now)
        for copied in take_times() if ended else ():
            self.loop.state.links.learn(copied)

    def note_wait(self, now: float) -> None:
        """Note that nothing can run: a stall begins if requests are alive and copies are in flight."""
        if not (self.num_copying and self.loop.state.sequences):
            self.end_wait(now)
        elif self._stalled_since_s is None:
            self._stalled_since_s = now

    def end_wait(self, now: float) -> None:
        """End the stall, if there is one, and add its time to ``stall_s``."""
        if self._stalled_since_s is not None:
            self.stall_s += now - self._stalled_since_s
            self._stalled_since_s = None
