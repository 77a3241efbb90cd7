"""Tokens of one step where several may be outstanding, each over other sequences.

The batch of one outstanding step is a microbatch. Work is divided evenly over them: a pipeline is as slow as the
largest one. Sequences of outstanding steps are skipped, but stay in the view: a policy that does not see all of them
takes the wrong one for the latest, and two sequences can preempt each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from floodplain.core.view import View


def microbatch_budget(view: View) -> int:
    """Most tokens of the next step: all of ``max_batched_tokens`` if no other step may be outstanding.

    Else an equal share of all work, that of outstanding steps included. A prompt may have more, up to all of it: its
    rest could not run beside it, so that a share alone would halve it in each step.
    """
    if view.depth == 1:
        return view.max_batched_tokens
    pieces = list(_pieces(view))
    share = -(-(sum(pieces) + sum(view.outstanding_tokens)) // view.depth)
    return min(view.max_batched_tokens, max([share, *pieces]))


def _pieces(view: View) -> Iterator[int]:
    """Tokens that each sequence outside outstanding steps could compute now: a stream one, a prompt all of its rest."""
    for row in view.running:
        if row.seq_id not in view.outstanding:
            yield int(view.step < row.end_step) if row.is_decoding else row.num_remaining
    num_free_seqs = max(0, view.max_num_seqs - len(view.running) - len(view.loading))
    for row in view.waiting[:num_free_seqs]:
        yield row.num_remaining - row.num_cached_tokens
