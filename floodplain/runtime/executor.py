"""The interface through which the engine runs plans: a model runner, a pipeline, or a fake.

The simulator needs no shell: ``sim.instance`` drives the loop itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.tiers import CopyTime


class Executor(Protocol):
    """Runs step plans in the order of submission. Up to ``LoopConfig.depth`` plans may be outstanding."""

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
        """As ``poll_transfers``, but wait for the first one; empty if none is in flight, or after the timeout."""
        ...

    def take_copy_times(self) -> Sequence[CopyTime]:
        """Link times of the copies that ended since the last call; may be empty if they are not measured."""
        ...

    def close(self) -> None:
        """Give back all memory. Safe to call twice."""
        ...
