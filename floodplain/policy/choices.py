"""Service of requests with several choices: all choices of a request count as one."""

from __future__ import annotations

from collections import defaultdict

from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView, View
from floodplain.policy.ranking import live_rows


def tokens_of_requests(view: View, slice_steps: int) -> dict[SeqId, int]:
    """Output tokens, by sequence, of the request that it is a choice of; ended choices included.

    The second of a request's choices, the least served first, ranks as if the first had had its slice, and so on: so
    choices take turns, and a request of many choices is never served more than a slice at the cost of another.
    """
    rows = live_rows(view)
    tokens = {row.seq_id: row.num_ended_tokens + max(0, row.num_generated(view.step)) for row in rows}
    further: dict[SeqId, list[SequenceView]] = defaultdict(list)
    for row in rows:
        if row.parent != row.seq_id:
            further[row.parent].append(row)
    for parent, choices in further.items():
        ids = [row.seq_id for row in choices] + ([parent] if parent in tokens else [])
        total = sum([tokens[seq_id] for seq_id in ids]) - (len(ids) - 1) * choices[0].num_ended_tokens
        for place, seq_id in enumerate(sorted(ids, key=lambda each: (tokens[each], each))):
            tokens[seq_id] = total + place * slice_steps
    return tokens
