"""The requests of each try of a profile, and what clients saw of it and how much KV that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np

from floodplain.bench.run import read_trace
from floodplain.core.errors import UserError
from floodplain.profiler.goals import Answer
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.records import LoadRequest
from floodplain.workload.spec import MAX_REQUESTS, WorkloadSpec, build
from floodplain.workload.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The observations of one try: an answer for each request that was sent, the most KV that requests held, the pool.

    It is cut if its goals were out of reach; ``error`` is that of the first request that failed.
    """

    answers: Sequence[Answer]
    is_cut: bool = False
    peak_kv_bytes: int
    kv_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The requests for a target: workload flags and their trace. Each try has its own rate, number and seed."""

    spec: WorkloadSpec
    trace: Trace | None = None

    @classmethod
    def read(cls, spec: WorkloadSpec) -> Self:
        """The load that the flags describe. Raises UserError if the trace cannot be read."""
        trace = read_trace(spec)
        return cls(spec, None if trace is None else Trace(trace.rows[: spec.limit]))

    def make(self, tokenizer: PromptTokenizer, rate: float, seed: int, duration_s: float) -> list[LoadRequest]:
        """The requests of one try: at least one, the last arriving at the end.

        Without a trace the arrivals have the flags' burstiness. With one they are a piece of it, of the needed length,
        that begins at a place drawn by the seed; its arrivals are stretched to the rate. Raises UserError if there
        would be too many, or one of them would be too long.
        """
        count = max(1, round(rate * duration_s))
        if count > MAX_REQUESTS:
            raise UserError(f"a try of {duration_s:g} s at {rate:g} requests/s has too many requests: shorten it")
        spec = replace(self.spec, seed=seed % 2**63, goodput=())
        if self.trace is None:
            return build(replace(spec, request_rate=rate, num_prompts=count), tokenizer)
        return build(replace(spec, limit=None), tokenizer, _piece(self.trace, count, rate, seed))


def _piece(trace: Trace, count: int, rate: float, seed: int) -> Trace:
    """``count`` consecutive rows at exactly this mean rate; after the last row the first follows."""
    start = int(np.random.default_rng(seed).integers(len(trace.rows)))
    rows = [trace.rows[(start + offset) % len(trace.rows)] for offset in range(count + 1)]
    mean_gap_s = trace.rows[-1].arrival_s / len(trace.rows)
    gaps_s = [b.arrival_s - a.arrival_s if b.arrival_s >= a.arrival_s else mean_gap_s for a, b in pairwise(rows)]
    scale = count / rate / total if (total := sum(gaps_s)) > 0 else 0.0
    arrivals_s = np.cumsum(gaps_s) * scale
    return Trace(tuple(replace(row, arrival_s=float(when)) for row, when in zip(rows[1:], arrivals_s, strict=True)))
