"""AQUA's completely fair scheduler: time slices, least served requests first (AQUA, section 7).

AQUA's requests have one answer; here all choices of a request count as one (``policy.ranking``).
"""

from __future__ import annotations

from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice, slice_for, tokens_of_requests


class CfsPolicy(SharingPolicy):
    """Every ``slice_steps`` steps, or when a request ends, refills the device with the least served requests.

    A newcomer has been served nothing and ranks first. Between the ends of slices it enters only if there is room.
    """

    name = "cfs"

    def rank(self, view: View, now: float) -> Ranking:
        """Rank prompts before streams, the least served first; residents stay until the slice ends."""
        current = slice_for(view, view.num_blocks, self.settings)
        slice_steps = self._lengthen(current.steps)
        served = tokens_of_requests(view, slice_steps)
        rows = sorted(live_rows(view), key=lambda row: (*service(row, view.step, served[row.seq_id]), row.order_key))
        is_end = view.step % slice_steps == 0 or view.completion_step == view.step
        staying = rows_in_slice(view, 1) if is_end else [row.seq_id for row in view.running]
        return Ranking(rows, frozenset(staying), slice_steps, current.reason, refills=True)

    def _lengthen(self, num_steps: int) -> int:
        """The configured slice, doubled up to ``num_steps``: ends of longer slices are ends of shorter ones."""
        slice_steps = self.settings.slice_steps
        while slice_steps < num_steps:
            slice_steps *= 2
        return slice_steps


def service(row: SequenceView, step: int, num_generated: int) -> tuple[bool, int]:
    """(whether its request has a token, ``num_generated`` of it or before that prompt tokens), as in the paper.

    With one sum, a long prompt would wait, half computed, until every stream has been served as many tokens.
    """
    return (True, num_generated) if num_generated > 0 else (False, prefilled_tokens(row, step))


def prefilled_tokens(row: SequenceView, step: int) -> int:
    """Prompt tokens computed for the request, recomputed and shared ones excluded; 0 for its later choices."""
    if row.parent != row.seq_id:
        return 0
    if row.num_generated(step) > 0:
        return row.num_prompt
    num_kept = 0 if row.status is Status.WAITING else row.num_restorable_tokens
    return min(row.num_prompt, max(row.num_scheduled, num_kept))
