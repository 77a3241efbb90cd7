"""Messages between our scheduler side and our worker side in each step of vLLM. All of them can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from floodplain.core.plan import Transfer
from floodplain.core.tiers import CopyTime

COPY = "floodplain:"
"""Workers report the end of an inbound copy to vLLM by this and its number; other connectors report requests."""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """From the scheduler to every worker, with each step.

    ``transfers``: copies to begin, before this step computes. ``is_idle``: nothing is computed in this step: a worker
    may wait for copies.
    """

    transfers: tuple[Transfer, ...] = ()
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """From the workers to the scheduler, after each step.

    ``ended``: by copy: how many workers report its end, and the places of blocks that are not whole on one of them.
    ``copy_times``: how long links were busy.
    """

    ended: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    copy_times: tuple[CopyTime, ...] = ()

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Return both reports as one."""
        ended = dict(self.ended)
        for transfer_id, (num_workers, lost) in other.ended.items():
            num_so_far, lost_so_far = ended.get(transfer_id, (0, frozenset()))
            ended[transfer_id] = (num_so_far + num_workers, lost_so_far | lost)
        return WorkerReport(ended, (*self.copy_times, *other.copy_times))
