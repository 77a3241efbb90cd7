"""Fair shares: the request, or the API key, with the least served work runs next (bounds: docs/design/004).

Served work is counted for each request, all its choices together, or for each API key and within it for each request.
It is lifted to the active minimum at arrival and on return from idle (``core.served``). So new requests start level
with the least served active one, and a stream of new requests does not starve old ones, as it does under ``cfs``.
"""

from __future__ import annotations

from collections import defaultdict

from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.served import weighted_work
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice, slice_for, tokens_of_requests
from floodplain.policy.shares import work_of_keys


class FairPolicy(SharingPolicy):
    """Ranks requests by least served work, for each request or for each API key."""

    name = "fair"

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """By key, the key's place in line: else one key's long line would hide other keys' requests."""
        return (0, seq.account.place, seq.seq_id) if self.settings.fair_by == "key" else super().waiting_key(seq)

    def rank(self, view: View, now: float) -> Ranking:
        """Rank by least work, ties by arrival; priority acts only as a weight of work."""
        count = work_by_key if self.settings.fair_by == "key" else work_by_request
        current = slice_for(view, view.num_blocks, self.settings)
        work = count(view, current.steps)
        rows = sorted(live_rows(view), key=lambda row: (work[row.seq_id], row.order_key[1:]))
        return Ranking(rows, frozenset(rows_in_slice(view, current.steps)), current.steps, current.reason)


def work_by_request(view: View, slice_steps: int) -> dict[int, float]:
    """Rank value of each sequence by id: its request's credit and weighted generated tokens."""
    served = tokens_of_requests(view, slice_steps)
    return {row.seq_id: row.credit + weighted_work(0, served[row.seq_id], row.order_key[0]) for row in live_rows(view)}


def work_by_key(view: View, slice_steps: int) -> dict[int, float]:
    """Rank value of each request by id: the work of all its key's requests, least served within a key first.

    The second request of a key ranks as if the first had had its slice, and so on: keys alternate within one step.
    """
    own, totals = work_by_request(view, slice_steps), work_of_keys(view)
    by_key: dict[str, list[SequenceView]] = defaultdict(list)
    for row in live_rows(view):
        by_key[row.client].append(row)
    ranks: dict[int, float] = {}
    for client, rows in by_key.items():
        rows.sort(key=lambda row: (own[row.seq_id], row.order_key[1:]))
        for place, row in enumerate(rows):
            ranks[row.seq_id] = totals[client] + weighted_work(0, place * slice_steps, row.order_key[0])
    return ranks
