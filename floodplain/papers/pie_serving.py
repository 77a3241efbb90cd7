"""Pie's set-up: one engine on a GH200, whose KV layers stream between the GPU and its host, under chats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import add
from typing import Any, Literal

import numpy as np

from floodplain.cost.link import GB
from floodplain.cost.model_shape import shape_named
from floodplain.papers.claims import Unknown
from floodplain.papers.serving import P90_SIGMAS, Lengths, Served, rows_of, serve_rows
from floodplain.workload.arrivals import arrival_times
from floodplain.workload.traces import TraceRow

LONGEST = 2048
"""Tokens of OPT's longest context."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of requests, and how many a run serves."""

    name: str
    lengths: Lengths
    num_requests: int

    def rows(self, rate: float, seed: int) -> list[TraceRow]:
        """Poisson arrivals at ``rate`` per second; inf: all at once."""
        rng = np.random.default_rng(seed)
        pairs = self.lengths.draw(self.num_requests, rng)
        times = arrival_times(self.num_requests, rate, 1.0, rng)
        return rows_of(times, pairs)

    def scaled(self, factor: float) -> Dataset:
        """The dataset with lengths times ``factor``."""
        prompt, output = ((median * factor, p90 * factor) for median, p90 in (self.lengths.prompt, self.lengths.output))
        return replace(self, lengths=Lengths(prompt, output, self.lengths.longest))


def log_normal(mean: float, sigma: float) -> tuple[float, float]:
    """Median and 90th percentile of a log-normal length by its mean, and the deviation of its logarithm."""
    median = mean * float(np.exp(-sigma * sigma / 2))
    return median, median * float(np.exp(P90_SIGMAS * sigma))


SHAREGPT = Dataset("ShareGPT", Lengths(log_normal(161, 1.0), log_normal(338, 1.0), LONGEST), 64)
ALPACA = Dataset("Alpaca", Lengths(log_normal(19.3, 0.5), log_normal(58.5, 0.8), LONGEST), 400)
LINK = 371 * GB
"""The slower direction of C2C: Pie moves whole layers both ways."""
EXPANSIONS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
SAME = 0.95
"""Part of a larger pool's tokens per second that counts as the same performance."""
AT_ONCE = float("inf")
Factor = float | Literal["auto"]


def scenario(model: str, pool_gb: float, factor: Factor, host_ms: float, link: float | str = LINK) -> dict[str, Any]:
    """One engine on a GH200 whose KV pool has ``pool_gb`` GB; ``factor`` 1 is vLLM without streamed layers."""
    block_bytes = 16 * shape_named(model).kv_bytes_per_token()
    engine = {
        "policy": "fcfs", "kv_blocks": int(pool_gb * GB // block_bytes), "scheduling": "sync", "prefix_cache": False,
        "max_model_len": LONGEST,
    }  # fmt: skip
    expansion = {} if factor == 1.0 else {"expansion": {"factor": factor, "link": link}}
    return {"model": model, "device": "gh200-96gb", "cost": {"overhead_ms": host_ms}, "engine": engine} | expansion


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a dataset, and the GB of its KV pool; ``host_ms`` is the time of each step beside its kernels."""

    model: str
    dataset: Dataset
    pool_gb: float = 3.0
    host_ms: float = 0.0

    @property
    def name(self) -> str:
        """For legends."""
        return f"{self.model.upper()}, {self.dataset.name}, {self.pool_gb:g} GB"

    def serve(self, factor: Factor, seed: int, rate: float = AT_ONCE, link: float | str = LINK) -> Served:
        """Serve the dataset's requests, which arrive at ``rate`` per second."""
        rows = self.dataset.rows(rate, seed)
        return serve_rows(scenario(self.model, self.pool_gb, factor, self.host_ms, link), rows)

    @cache  # noqa: B019 - a few numbers of immutable cases
    def tokens_per_s(self, factor: Factor, seed: int, rate: float = AT_ONCE, link: float | str = LINK) -> float:
        """Output tokens per second of ``serve``; with a rate, until the last request arrives."""
        served = self.serve(factor, seed, rate, link)
        if rate == AT_ONCE:
            return float(served.result["output_throughput"])
        arrivals_s = [row.arrival_s for row in self.dataset.rows(rate, seed)]
        firsts_s = map(add, arrivals_s, served.ttft_s)
        times_s = (
            accumulate(gaps, initial=first_s) for first_s, gaps in zip(firsts_s, served.result["itls"], strict=True)
        )
        num_tokens = sum(time_s <= arrivals_s[-1] for stream in times_s for time_s in stream)
        return float(num_tokens / arrivals_s[-1])

    def own_tokens_per_s(self, seed: int, rate: float = AT_ONCE) -> float:
        """Under our controller, over the faster direction: only new rows are copied out."""
        return self.tokens_per_s("auto", seed, rate, link="c2c")

    def gains(self, seed: int) -> dict[float, float]:
        """Tokens per second by expansion, relative to no expansion, while all requests wait."""
        speeds = {factor: self.tokens_per_s(factor, seed) for factor in EXPANSIONS}
        return {factor: speed / speeds[1.0] for factor, speed in speeds.items()}

    def saved(self, seed: int) -> float:
        """The largest expansion that is as fast as a pool of its size."""
        pools = {factor: replace(self, pool_gb=factor * self.pool_gb) for factor in EXPANSIONS}
        return max(
            factor
            for factor, pool in pools.items()
            if self.tokens_per_s(factor, seed) >= SAME * pool.tokens_per_s(1.0, seed)
        )


HOST = Unknown("time of a step beside its kernels", {"0 ms": 0.0, "15 ms": 15.0}, "0 ms")
COMMON = (
    "Lengths are log-normal with the means of vLLM's paper, which Pie follows (ShareGPT 161 and 338 tokens, Alpaca 19 "
    "and 58); their spreads are assumed (sigma 1, and 0.5 and 0.8).",
    "A roofline of the GH200 stands for its kernels.",
    "Layers stream as in Floodplain: their KV comes in whole through three slots. Pie also copies whole layers out, so "
    "the slower direction of the link limits both.",
    "vLLM is first come, first served in chunks of up to 2,048 tokens, and computes preempted requests again.",
)
OWN = "Floodplain's own way is its controller (`--kv-expansion auto`), and copies out new rows only."
