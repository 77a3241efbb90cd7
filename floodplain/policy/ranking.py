"""Who should be on the device, in order: what policies that take turns differ in."""

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
        rows: First the ones that should be there most.
        staying: Those of them that are there and may not be sent away yet for others: their slice has just begun.
        slice_steps: Steps that whoever comes now stays at least.
        reason: Why it is not the ranking that the policy would like.
        refills: Whether room is made for all that shall come at once; else for one after the other, as blocks that
            must be copied first become free, so that copies spread out.
        caps_prompts: Whether prompts get no more than their part of a step; else what streams leave of it, as in FCFS.
        prefill_share: That part; None: as the settings say.
    """

    rows: Seq[SequenceView]
    staying: frozenset[SeqId]
    slice_steps: int
    reason: Reason | None = None
    refills: bool = False
    caps_prompts: bool = True
    prefill_share: float | None = None


def live_rows(view: View) -> list[SequenceView]:
    """Every live request that the view shows."""
    return [*view.running, *view.loading, *view.swapped, *view.waiting]


def rows_in_slice(view: View, slice_steps: int) -> list[SeqId]:
    """Those on the device whose slice is not over."""
    begun = view.step - slice_steps
    return [row.seq_id for row in view.running if row.entered_step > begun]
