"""Judges whether a try meets its goals: a share of its requests, and of the gaps in its streams, within limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.core.lifecycle import (
    end_to_end_s,
    inter_token_latencies_s,
    time_per_output_token_s,
    time_to_first_token_s,
)

P99 = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client saw of one request, on any one clock.

    A request under way when its try is cut is judged by what it had at ``cut_s``. A failed one is within no goals.
    """

    sent_s: float
    token_times_s: Sequence[float]
    is_whole: bool = True
    cut_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """The time to the first token; without one the wait until the cut, or infinity."""
        ttft_s = time_to_first_token_s(self.sent_s, self.token_times_s)
        return ttft_s if ttft_s is not None else math.inf if self.cut_s is None else self.cut_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a try: shares within the limits, failures, and 99th percentiles.

    ``gap_share`` is None without a limit of gaps. A percentile is None if more than 1 of 100 had none.
    """

    meets: bool
    good_share: float
    gap_share: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TryGoals:
    """The goals of a try: this share of its requests, and of the gaps between tokens, must be within the limits.

    A percentile is judged by counting: "TTFT p99 within 1 s" means that at most 1 of 100 requests took longer. The gaps
    of all requests of a try are one pool. Limits of one request are named ``ttft``, ``tpot`` and ``e2el``.
    """

    share: float = P99
    limits_s: Mapping[str, float]
    gap_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"the share of requests within the goals must be above 0 and at most 1, not {self.share}")

    def allow(self, count: int) -> int:
        """How many of ``count`` may be beyond their limit."""
        return allowed_misses(self.share, count)

    def is_within(self, answer: Answer) -> bool:
        """Whether a request that has ended, or was cut, is within its limits."""
        has_answer = answer.cut_s is not None or (answer.is_whole and bool(answer.token_times_s))
        return has_answer and not self.is_beyond(answer)

    def is_beyond(self, answer: Answer, max_tokens: int | None = None) -> bool:
        """Whether a request is beyond a limit.

        With ``max_tokens``, the most that it may get, the answer is that so far: True stays true whatever follows.
        """
        times_s = answer.token_times_s
        tpot_s = time_per_output_token_s(times_s) or 0.0  # 0 for one token, as in vLLM
        if max_tokens is not None and len(times_s) > 1:
            tpot_s *= (len(times_s) - 1) / max(1, max_tokens - 1, len(times_s) - 1)
        values_s = {
            "ttft": answer.ttft_s,
            "tpot": tpot_s,
            "e2el": answer.ttft_s if not times_s else end_to_end_s(answer.sent_s, times_s) or 0.0,
        }
        return any(values_s[name] > limit_s for name, limit_s in self.limits_s.items())

    def score(self, answers: Sequence[Answer], *, is_cut: bool = False) -> Score:
        """Judge a try by at least one answer; one that was cut since its goals were out of reach does not meet them."""
        good = sum(map(self.is_within, answers))
        gaps_s = [gap for answer in answers for gap in inter_token_latencies_s(answer.token_times_s)]
        late_gaps = 0 if self.gap_s is None else sum(gap > self.gap_s for gap in gaps_s)
        is_met = len(answers) - good <= self.allow(len(answers)) and late_gaps <= self.allow(len(gaps_s))
        return Score(
            meets=is_met and not is_cut,
            good_share=good / len(answers),
            gap_share=None if self.gap_s is None else 1 - late_gaps / max(1, len(gaps_s)),
            ttft_p99_s=percentile_99([answer.ttft_s for answer in answers]),
            itl_p99_s=percentile_99(gaps_s),
            num_failed=sum(not answer.is_whole and answer.cut_s is None for answer in answers),
        )


def allowed_misses(share: float, count: int) -> int:
    """How many of ``count`` may be beyond a limit if ``share`` of them must be within it."""
    return math.floor((1 - share) * count + 1e-9)


def percentile_99(values: Sequence[float]) -> float | None:
    """The least value that at most 1 of 100 exceed (``quantile``: 2 of 150 may); None for none, and if infinite."""
    if not values:
        return None
    value = sorted(values, reverse=True)[allowed_misses(P99, len(values))]
    return value if math.isfinite(value) else None
