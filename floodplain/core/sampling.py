"""Sampling parameters: how the next token of a request is chosen, and when the request ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from floodplain.core.errors import UserError
from floodplain.core.ranges import MAX_COUNT, Range

MAX_LOGPROBS = 20
"""The most alternatives that a request may ask for at each position, as in the OpenAI API."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling fields of a request, with vLLM's names and defaults.

    UserError, which names it, for one out of range.

    Attributes:
        max_tokens: Most tokens to generate; None means as many as ``max_model_len`` leaves.
        min_tokens: Fewest tokens before an end-of-sequence token or a stop condition may end the request.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: Keep this many of the likeliest tokens; 0 or -1 keeps all.
        seed: Makes the request's own samples reproducible, however it is batched or preempted.
        stop: The request ends before the first of these strings in its text.
        ignore_eos: Go on past end-of-sequence tokens (to replay a trace at its own length).
        logprobs: Report the chosen token's log-probability and this many alternatives; None reports none.
        skip_special_tokens: Leave special tokens out of the text.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Range(-1, MAX_COUNT)] = 0
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop: object = self.stop  # callers from untyped code pass one string, or lists
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for is_good, problem in self._checks():
            if not is_good:
                raise UserError(problem)

    def _checks(self) -> tuple[tuple[bool, str], ...]:
        max_tokens, logprobs = self.max_tokens, self.logprobs
        return (
            (max_tokens is None or max_tokens >= 1, f"max_tokens must be at least 1, not {max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must not be negative, not {self.min_tokens}"),
            (
                max_tokens is None or self.min_tokens <= max_tokens,
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({max_tokens})",
            ),
            (
                math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
                f"temperature must be between 0 and 100, not {self.temperature}",
            ),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}"),
            (self.top_k >= -1, f"top_k must be -1, 0 (both: all tokens) or more, not {self.top_k}"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**64,
                f"seed must fit in 64 bits, not {self.seed}",
            ),
            (all(self.stop), "stop must not hold an empty string"),
            (
                logprobs is None or 0 <= logprobs <= MAX_LOGPROBS,
                f"logprobs must be between 0 and {MAX_LOGPROBS}, not {logprobs}",
            ),
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken: at temperature 0, and so near it that nothing else is likely."""
        return self.temperature < GREEDY_BELOW
