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

    Attributes:
        sent_s: When it was sent.
        token_times_s: When each output token arrived.
        is_whole: Whether it finished. A failed request is not within any goals.
        cut_s: When the try was cut, if the request was still under way: it is judged by what it had by then.
    """

    sent_s: float
    token_times_s: Sequence[float]
    is_whole: bool = True
    cut_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token; without one the wait until the cut, or infinity."""
        ttft_s = time_to_first_token_s(self.sent_s, self.token_times_s)
        return ttft_s if ttft_s is not None else math.inf if self.cut_s is None else self.cut_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a try.

    Attributes:
        meets: Whether it met the goals.
        good_share: Requests within their limits, as a part of all.
        gap_share: Gaps between tokens within theirs, as a part of those of all requests; None without such a goal.
        ttft_p99_s: 99 of 100 requests had their first token by then; None if more had none.
        itl_p99_s: 99 of 100 gaps were no longer; None without gaps.
        num_failed: Requests that failed.
    """

    meets: bool
    good_share: float
    gap_share: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TryGoals:
    """The goals of a try.

    A percentile is judged by counting: "TTFT p99 within 1 s" means that at most 1 of 100 requests took longer. The
    gaps of all requests of a try are one pool, as in "time between tokens p99" of Sarathi and AQUA.

    Attributes:
        share: This part of the requests, and of the gaps, must be within the limits.
        limits_s: Of one request, by name: ``ttft``, ``tpot``, ``e2el``.
        gap_s: The longest gap between two tokens; None: there is no limit.

    Raises:
        UserError: The share is not above 0 and at most 1.
    """

    share: float = P99
    limits_s: Mapping[str, float]
    gap_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"the share of requests within the goals must be above 0 and at most 1, not {self.share}")

    def allow(self, count: int) -> int:
        """Return how many of ``count`` may be beyond their limit."""
        return allowed_misses(self.share, count)

    def is_within(self, answer: Answer) -> bool:
        """Whether a request that has ended, or was cut, is within its limits."""
        has_answer = answer.cut_s is not None or (answer.is_whole and bool(answer.token_times_s))
        return has_answer and not self.is_beyond(answer)

    def is_beyond(self, answer: Answer, max_tokens: int | None = None) -> bool:
        """Whether a request is beyond a limit.

        Args:
            answer: Of the request; if ``max_tokens`` is given, so far: then no later token makes the result untrue.
            max_tokens: The most tokens that it may get.
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
        """Judge a try.

        Args:
            answers: One for each request, at least one; in a try that was cut, for each that was sent.
            is_cut: Whether it ended because the goals were out of reach.
        """
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
    """Return how many of ``count`` may be beyond a limit if ``share`` of them must be within it."""
    return math.floor((1 - share) * count + 1e-9)


def percentile_99(values: Sequence[float]) -> float | None:
    """Return the least value that at most 1 of 100 exceed: it is above a limit exactly if more than 1 of 100 are.

    None for no values, and if it is infinite.
    """
    if not values:
        return None
    value = sorted(values, reverse=True)[allowed_misses(P99, len(values))]
    return value if math.isfinite(value) else None
