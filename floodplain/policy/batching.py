"""How the tokens of a step are divided between prompts and streams (AQUA, section 7: p prefill and d decode tokens)."""

from __future__ import annotations

from floodplain.core.view import SequenceView, View

UNPRICED_PREFILL = 256
"""Prompt tokens in a step beside decodes while no step has shown what they cost."""


class TokenBudget:
    """Scratch state of one decision.

    Every stream on the device gets its token. Prompts get the rest, but while streams wait for the step to end no more
    than ``prefill_share`` of its time: "first tokens first" must not starve those that have had theirs. None: as much
    as there is.
    """

    def __init__(self, view: View, prefill_share: float | None) -> None:
        num_streams = sum(wants_one_token(view, row) for row in view.running)
        self.num_left = view.max_batched_tokens
        self._prefill = max(0, view.max_batched_tokens - num_streams)
        if num_streams and prefill_share is not None:
            self._prefill = min(self._prefill, prefill_cap(view, prefill_share))

    def prefill_for(self, num_tokens: int) -> int:
        """How many of these prompt tokens the step has room for."""
        return max(0, min(num_tokens, self._prefill, self.num_left))

    def take_prefill(self, num_tokens: int) -> int:
        """Put as many of these prompt tokens as there is room for into the step; return how many."""
        num_taken = self.prefill_for(num_tokens)
        self._prefill -= num_taken
        self.num_left -= num_taken
        return num_taken

    def take_decode(self) -> None:
        """Put one more stream into the step."""
        self.num_left -= 1


def wants_one_token(view: View, row: SequenceView) -> bool:
    """Whether a running sequence is a stream that wants its next token, just back from swap space perhaps.

    Whoever comes back whole computes one token as a chunk: that is a decode, and no prompt may take its place.
    """
    return view.step < row.end_step if row.is_decoding else row.num_remaining == 1


def prefill_cap(view: View, prefill_share: float) -> int:
    """Prompt tokens that take ``prefill_share`` of the time of a step with decodes; at least one block of them."""
    prices = view.prices
    if not (prices.step_s and prices.prefill_token_s):
        return UNPRICED_PREFILL
    prefill_s = prices.step_s * prefill_share / (1 - prefill_share)
    return max(view.block_tokens, int(prefill_s / prices.prefill_token_s))
