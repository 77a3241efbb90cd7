"""Fair shares: who has been given the least goes next, and nobody's past or absence is an advantage.

Served work is counted for each request, or for each API key and within it for each request, and lifted to the active
minimum at arrival and on return from idle (``core.served``). So newcomers go first only as far as the least served of
those before them have come: the old are not starved by a stream of new ones, which is what ``cfs`` does.

Bound: between two turns of a request another one takes at most D // s + 1, if it had been given D tokens less when the
first left and a turn is worth s; beside those turns that its prompt takes. Where one leaves for one, nobody leaves more
than a slice above the least, and that is two. Nobody who arrives later has a first turn before, unless a copy that was
begun for somebody else brings what a request needs.
"""

from __future__ import annotations

from collections import defaultdict

from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.served import weighted_work
from floodplain.core.view import SequenceView, View
from floodplain.policy.cfs import prefilled_tokens
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice
from floodplain.policy.sharing import SharingPolicy
from floodplain.policy.slices import slice_for


class FairPolicy(SharingPolicy):
    """See the module's docstring."""

    name = "fair"

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """Between keys, their turns: else a key with a long line would hide the others' requests behind it."""
        return (0, seq.place, seq.seq_id) if self.settings.fair_by == "key" else super().waiting_key(seq)

    def rank(self, view: View, now: float) -> Ranking:
        """The least work first, and of those the first that arrived: priority is a weight of work, and nothing else."""
        count = work_by_key if self.settings.fair_by == "key" else work_by_request
        current = slice_for(view, view.num_blocks, self.settings)
        work = count(view, current.steps)
        rows = sorted(live_rows(view), key=lambda row: (work[row.seq_id], row.order_key[1:]))
        return Ranking(rows, frozenset(rows_in_slice(view, current.steps)), current.steps, current.reason)


def work_by_request(view: View, slice_steps: int) -> dict[int, float]:
    """Each request counts for itself, by what it generated."""
    return {row.seq_id: row.credit + _work(row, view.step, num_prompt=0) for row in live_rows(view)}


def work_by_key(view: View, slice_steps: int) -> dict[int, float]:
    """All requests of a key count together, and within a key each for itself.

    The second request of a key ranks as if the first had had its turn, and so on: keys alternate within one step.
    """
    own = work_by_request(view, slice_steps)
    by_key: dict[str, list[SequenceView]] = defaultdict(list)
    for row in live_rows(view):
        by_key[row.client].append(row)
    ranks: dict[int, float] = {}
    for client, rows in by_key.items():
        rows.sort(key=lambda row: (own[row.seq_id], row.order_key[1:]))
        total = view.key_credits.get(client, 0.0)
        total += sum(_work(row, view.step, prefilled_tokens(row, view.step)) for row in rows)
        for place, row in enumerate(rows):
            ranks[row.seq_id] = total + weighted_work(0, place * slice_steps, row.order_key[0])
    return ranks


def _work(row: SequenceView, step: int, num_prompt: int) -> float:
    return weighted_work(num_prompt, max(0, row.num_generated(step)), row.order_key[0])
