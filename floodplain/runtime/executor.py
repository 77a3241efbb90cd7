"""What the loop's shell needs of whoever runs its plans: an engine, or a test.

The simulator needs no shell: ``sim.instance`` drives the loop itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.tiers import CopyTime


class Executor(Protocol):
    """Runs step plans in the order in which they are submitted. Several may be under way: as many as the loop plans."""

    def submit(self, plan: StepPlan) -> None:
        """Take the next plan: apply its tables, start its transfers, run its batch after those of earlier plans.

        It may return before the batch has run.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan that was not collected: one token per sampled sequence."""
        ...

    def poll_transfers(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Transfers that ended since the last call.

        Returns:
            (transfer id, places in ``Transfer.blocks`` of the blocks that did not arrive whole) of each.
        """
        ...

    def wait_transfers(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """The same, waiting for the first one; empty if none is under way or the time is over."""
        ...

    def take_copy_times(self) -> Sequence[CopyTime]:
        """How long links were busy with the copies that ended since the last call; may be empty where nobody knows."""
        ...

    def close(self) -> None:
        """Give back all memory. Safe to call twice."""
        ...
