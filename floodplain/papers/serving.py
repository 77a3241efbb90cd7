"""What the papers' experiments share: loads by lengths and bursts, served by scenarios of the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario, make_scenario
from floodplain.workload.traces import TraceRow

P90_SIGMAS = 1.2815515655446004
"""Where the 90th percentile of a normal distribution is, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths of prompts and outputs, each by its median and its 90th percentile, in tokens."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    longest: int

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """(prompt, output) of ``count`` requests; prompts are cut so that both together have ``longest`` tokens."""
        drawn = [
            np.exp(rng.normal(math.log(median), math.log(p90 / median) / P90_SIGMAS, count))
            for median, p90 in (self.prompt, self.output)
        ]
        outputs = np.clip(drawn[1], 1, self.longest // 2).astype(int)
        prompts = np.clip(drawn[0], 1, self.longest - outputs).astype(int)
        return [(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


SHAREGPT = Lengths((1730, 5696), (415, 834), 8192)
ARXIV = Lengths((7059, 12985), (208, 371), 16384)
"""Both as in Sarathi-Serve (OSDI 2024), Table 2, which AQUA follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """A stable load, a minute at a multiple of its rate, a pause in which others get what arrives, and a stable tail.

    Arrivals are Poisson in each part.

    Attributes:
        rate: Requests per second of the stable load.
        num_before, num_after: Requests before the burst, and after the pause.
        pause_s: Seconds after the burst without arrivals.
    """

    rate: float
    factor: float
    pause_s: float
    num_before: int = 25
    num_after: int = 10
    burst_s: float = 60.0

    @property
    def num_in_burst(self) -> int:
        """Requests that arrive in the burst."""
        return round(self.rate * self.factor * self.burst_s)

    def rows(self, lengths: Lengths, seed: int) -> list[TraceRow]:
        """The requests in order of arrival; the same for the same seed."""
        rng = np.random.default_rng(seed)
        parts = (
            (self.num_before, self.num_before / self.rate, 0.0),
            (self.num_in_burst, self.burst_s, self.pause_s),
            (self.num_after, self.num_after / self.rate, 0.0),
        )
        times, start_s = list[float](), 0.0
        for count, duration_s, pause_s in parts:
            times += [start_s + float(when) for when in np.sort(rng.uniform(0, duration_s, count))]
            start_s += duration_s + pause_s
        return rows_of(times, lengths.draw(len(times), rng))


def rows_of(times_s: Iterable[float], lengths: Iterable[tuple[int, int]]) -> list[TraceRow]:
    """A request at each time, with the (prompt, output) of its place."""
    return [TraceRow(float(when), *pair) for when, pair in zip(times_s, lengths, strict=True)]


def poisson_rows(lengths: Lengths, rate: float, count: int, seed: int, start_s: float = 0.0) -> list[TraceRow]:
    """``count`` requests at a steady rate, in order of arrival; the same for the same seed."""
    rng = np.random.default_rng(seed)
    times = start_s + np.sort(rng.uniform(0, count / rate, count))
    return rows_of(times, lengths.draw(count, rng))


_GOALS = {"goodput": ["ttft:1000"]}
"""No figure asks for the share of requests within goals; without any, some are simulated alone to find them."""


@dataclass(frozen=True, slots=True)
class Served:
    """What each request got, in order of arrival: seconds from arrival to its first and last token, and per token."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    result: Mapping[str, Any]


def scenario_of(content: Mapping[str, Any]) -> Scenario:
    """A scenario as its file would say it. UserError if it is not valid."""
    return make_scenario({"workload": _GOALS} | dict(content), "figure", Path())


def serve_rows(scenario: Mapping[str, Any] | Scenario, rows: Sequence[TraceRow]) -> Served:
    """Serve ``rows`` in a scenario. UserError if it is not valid."""
    result = predict(scenario if isinstance(scenario, Scenario) else scenario_of(scenario), rows).result
    ttfts, spans = result["ttfts"], [sum(gaps) for gaps in result["itls"]]
    return Served(
        ttft_s=tuple(ttfts),
        tpot_s=tuple(span / max(1, len(gaps)) for span, gaps in zip(spans, result["itls"], strict=True)),
        e2e_s=tuple(ttft + span for ttft, span in zip(ttfts, spans, strict=True)),
        result=result,
    )


def capacity(scenario: Mapping[str, Any], lengths: Sequence[tuple[int, int]]) -> float:
    """Requests per second that a scenario completes if requests of these lengths all wait from the start on."""
    rows = [TraceRow(0.0, *pair) for pair in lengths]
    return len(rows) / float(serve_rows(scenario, rows).result["duration"])
