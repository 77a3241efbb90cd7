"""Divides a step's tokens between prompts and streams (AQUA, section 7: p prefill, d decode tokens)."""

from __future__ import annotations

from floodplain.core.view import SequenceView, View

UNPRICED_PREFILL = 256
"""Most prompt tokens in a step with decodes while the price of prompt tokens is unknown."""


class TokenBudget:
    """Tokens of one step that are left; scratch state of one decision.

    Every stream on the device gets its token, and prompts get the rest. In a step with streams, prompts get at most
    ``prefill_share`` of its time: "first tokens first" must not starve streams. None: no such limit.
    """

    def __init__(self, view: View, prefill_share: float | None) -> None:
        num_streams = sum(wants_one_token(view, row) for row in view.running)
        self.num_left = view.max_batched_tokens
        self._prefill = max(0, view.max_batched_tokens - num_streams)
        if num_streams and prefill_share is not None:
            self._prefill = min(self._prefill, prefill_cap(view, prefill_share))

    def prefill_for(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` prompt tokens fit into the step."""
        return max(0, min(num_tokens, self._prefill, self.num_left))

    def take_prefill(self, num_tokens: int) -> int:
        """Take as many of ``num_tokens`` prompt tokens as fit into the step; return how many."""
        num_taken = self.prefill_for(num_tokens)
        self._prefill -= num_taken
        self.num_left -= num_taken
        return num_taken

    def take_decode(self) -> None:
        """Take one decode token."""
        self.num_left -= 1


def wants_one_token(view: View, row: SequenceView) -> bool:
    """Whether a running sequence has exactly one token to compute: a decode, or a resumed stream's chunk.

    A stream that was swapped in completely computes one token as a chunk: it counts as a decode, ahead of prompts.
    """
    return view.step < row.end_step if row.is_decoding else row.num_remaining == 1


def prefill_cap(view: View, prefill_share: float) -> int:
    """Prompt tokens that take ``prefill_share`` of the time of a step with decodes; at least one block."""
    prices = view.prices
    if not (prices.step_s and prices.prefill_token_s):
        return UNPRICED_PREFILL
    prefill_s = prices.step_s * prefill_share / (1 - prefill_share)
    return max(view.block_tokens, int(prefill_s / prices.prefill_token_s))
