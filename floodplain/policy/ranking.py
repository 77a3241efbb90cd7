"""Rankings: the order in which live requests should be on the device, which each policy defines."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView, View


@dataclass(frozen=True, slots=True)
class Ranking:
    """All live requests in the order in which they should be on the device.

    Attributes:
        rows: The requests, highest rank first.
        staying: Residents that may not be preempted for other requests yet, because their slice is not over.
        slice_steps: Least steps for which a request that enters now stays.
        reason: What limits the ranking, if the policy could not rank as it would like; else None.
        refills: Whether room is made at once for all requests that should enter; else for one after the other, as
            their victims' blocks are copied and become free, so that copies spread out.
        caps_prompts: Whether prompts get at most ``prefill_share`` of a step; else all that streams leave, as in FCFS.
        prefill_share: Part of a step's time for prompts; None: that of the settings.
    """

    rows: Seq[SequenceView]
    staying: frozenset[SeqId]
    slice_steps: int
    reason: Reason | None = None
    refills: bool = False
    caps_prompts: bool = True
    prefill_share: float | None = None


def live_rows(view: View) -> list[SequenceView]:
    """All live requests that the view shows: running, loading, swapped, waiting."""
    return [*view.running, *view.loading, *view.swapped, *view.waiting]


def rows_in_slice(view: View, slice_steps: int) -> list[SeqId]:
    """Ids of running sequences whose slice is not over."""
    begun = view.step - slice_steps
    return [row.seq_id for row in view.running if row.entered_step > begun]
