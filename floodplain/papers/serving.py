"""Serves the requests of a figure by scenarios of the simulator, and reads what each request got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario, make_scenario
from floodplain.workload.traces import TraceRow

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
