"""What statistics of a load need of its requests: 48 bytes each, however many tokens they have."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from floodplain.core import lifecycle
from floodplain.core.quantiles import quantile
from floodplain.workload.records import RequestRecord

Floats = npt.NDArray[np.float64]
PERCENTILES = (90, 95, 99)
STATISTICS = ("mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES), "max")


def summarise(values: Sequence[float] | Floats) -> dict[str, float | None]:
    """Mean, median, std (of the population), p90, p95, p99 (``core.quantiles``) and max; all None for no values."""
    if not len(values):
        return dict.fromkeys(STATISTICS)
    values = np.asarray(values, dtype=np.float64)
    in_order = np.sort(values).tolist()
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
        **{f"p{p}": quantile(in_order, p / 100) for p in PERCENTILES},
        "max": float(values.max()),
    }


class AllGaps:
    """Gaps between tokens in seconds, 8 bytes each; statistics are exact."""

    def __init__(self) -> None:
        self._gaps_s = array("d")

    def add(self, gaps_s: Floats) -> None:
        """Take in the gaps of a request."""
        self._gaps_s.frombytes(gaps_s.tobytes())

    @property
    def max_s(self) -> float | None:
        """The longest; None for no gaps."""
        return max(self._gaps_s, default=None)

    def summarise_ms(self) -> dict[str, float | None]:
        """As ``summarise``, in milliseconds."""
        return summarise(np.asarray(self._gaps_s) * 1e3)


class GapHistogram:
    """The same from counts of gaps in bins that grow by 0.1 %, 280 kB for any number of gaps.

    Mean, std and max are those of the gaps; percentiles are within 0.05 % of theirs between 1 ns and 1e6 s.
    """

    _LEAST_S, _MOST_S, _GROWTH = 1e-9, 1e6, math.log(1.001)

    def __init__(self) -> None:
        self.max_s: float | None = None
        self._counts = np.zeros(2 + math.ceil(math.log(self._MOST_S / self._LEAST_S) / self._GROWTH), dtype=np.int64)
        self._origin_s = self._sum_s = self._squares = 0.0  # sums are from a first gap on: equal gaps have no deviation

    def add(self, gaps_s: Floats) -> None:
        """Take in the gaps of a request."""
        if not len(gaps_s):
            return
        bins = np.log(np.maximum(gaps_s, self._LEAST_S) / self._LEAST_S) / self._GROWTH
        np.add.at(self._counts, np.minimum(np.ceil(bins).astype(np.int64), len(self._counts) - 1), 1)
        if self.max_s is None:
            self._origin_s = float(gaps_s[0])
        self.max_s = max(self.max_s or 0.0, float(gaps_s.max()))
        further_s = gaps_s - self._origin_s
        self._sum_s += float(further_s.sum())
        self._squares += float(further_s @ further_s)

    def summarise_ms(self) -> dict[str, float | None]:
        """As ``summarise``, in milliseconds."""
        num_gaps = int(self._counts.sum())
        if self.max_s is None:
            return dict.fromkeys(STATISTICS)
        mean_s = self._sum_s / num_gaps
        quantiles = {"median": 0.5, **{f"p{p}": p / 100 for p in PERCENTILES}}
        found_s: dict[str, Any] = {
            name: min(self._find_quantile_s(part * (num_gaps - 1)), self.max_s) for name, part in quantiles.items()
        }
        std_s = math.sqrt(max(0.0, self._squares / num_gaps - mean_s**2))
        found_s |= {"mean": self._origin_s + mean_s, "std": std_s, "max": self.max_s}
        return {name: found_s[name] * 1e3 for name in STATISTICS}

    def _find_quantile_s(self, rank: float) -> float:
        """Between the two values next to a rank, counted from 0."""
        low, high = np.searchsorted(np.cumsum(self._counts), [math.floor(rank), math.ceil(rank)], side="right")
        low_s, high_s = self._middle_s(int(low)), self._middle_s(int(high))
        return low_s + (high_s - low_s) * (rank - math.floor(rank))

    def _middle_s(self, place: int) -> float:
        """The middle of a bin; the first one has gaps of at most 1 ns, which count as 0."""
        return self._LEAST_S * math.exp((place - 0.5) * self._GROWTH) if place else 0.0


class LoadTable:
    """Columns of the completed requests of a load, and counts of all of them. Records are not kept.

    Attributes:
        start_s: Where the seconds begin in which tokens are counted.
        sent_s: When each completed request was sent; the columns have the same order.
        latencies_s: Its TTFT, TPOT and E2E under their names in results; NaN if it has none.
        num_requests: Failed ones included.
        num_prompt_tokens: Of the completed ones.
        end_s: When the last answer ended or failed.
        max_lag_s: The longest time from an arrival to its sending; None without requests.
        max_wait_s: The longest time in which a request got no token; None without completed ones.
    """

    def __init__(self, gaps: AllGaps | GapHistogram, start_s: float = 0.0) -> None:
        self.gaps, self.start_s = gaps, start_s
        self.sent_s, self.finished_s, self.num_tokens = array("d"), array("d"), array("q")
        self.latencies_s = {"ttft": array("d"), "tpot": array("d"), "e2el": array("d")}
        self.num_requests = self.num_prompt_tokens = 0
        self.end_s = 0.0
        self.max_lag_s: float | None = None
        self.max_wait_s: float | None = None
        self._tokens_by_second: Counter[int] = Counter()

    def add(self, record: RequestRecord) -> None:
        """Take in a request that has completed or failed."""
        self.num_requests += 1
        self.end_s = max(self.end_s, record.finished_s)
        lag_s = record.sent_s - record.arrival_s
        self.max_lag_s = lag_s if self.max_lag_s is None else max(self.max_lag_s, lag_s)
        if record.error is None:
            self._add_completed(record, record.token_times_s)

    def _add_completed(self, record: RequestRecord, times_s: Sequence[float]) -> None:
        ttft_s = lifecycle.time_to_first_token_s(record.sent_s, times_s)
        tpot_s, e2e_s = lifecycle.time_per_output_token_s(times_s), lifecycle.end_to_end_s(record.sent_s, times_s)
        for column, value in zip(self.latencies_s.values(), (ttft_s, tpot_s, e2e_s), strict=True):
            column.append(math.nan if value is None else value)
        self.sent_s.append(record.sent_s)
        self.finished_s.append(record.finished_s)
        self.num_tokens.append(len(times_s))
        self.num_prompt_tokens += record.prompt_tokens
        gaps_s = lifecycle.inter_token_latencies_s(times_s)
        self.gaps.add(np.asarray(gaps_s, dtype=np.float64))
        self.max_wait_s = max(self.max_wait_s or 0.0, ttft_s or 0.0, *gaps_s)
        seconds, counts = np.unique((np.asarray(times_s) - self.start_s).astype(np.int64), return_counts=True)
        self._tokens_by_second.update(dict(zip(seconds.tolist(), counts.tolist(), strict=True)))

    @property
    def num_completed(self) -> int:
        """Requests whose answers are complete."""
        return len(self.sent_s)

    @property
    def max_tokens_per_s(self) -> float | None:
        """The most tokens in one second, counted from ``start_s``; None without tokens."""
        return float(max(self._tokens_by_second.values())) if self._tokens_by_second else None
