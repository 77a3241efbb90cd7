"""The columns of a comparison: latencies, attainment and throughput, pooled over all requests of the runs.

A run is a mapping, as benchmarks keep it in JSON: a list with a value for each answered request under ``ttft_s``,
``tpot_s``, ``e2e_s`` and ``longest_gap_s``; ``output_tokens``, ``duration_s``, ``goals_s`` (TTFT, TPOT) and ``failed``
(a number of requests, 0 if it is absent). A run that was measured before a key was added lacks the key; columns that
need it are then None, and shown as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from floodplain.core import lifecycle

Runs = Sequence[Mapping[str, Any]]
Formula = Callable[[Runs], float | None]

MISSING = "-"


def latency_lists(times: Iterable[tuple[float, Sequence[float]]]) -> dict[str, Any]:
    """Return the part of a run that comes from its requests: latencies to 0.1 ms, and ``output_tokens``.

    TPOT of an answer of one token is 0, as in goodput.

    Args:
        times: (arrival, time of each output token) of each answered request, in seconds.
    """
    known = list(times)
    return {
        "output_tokens": sum(len(tokens_s) for _, tokens_s in known),
        "ttft_s": [_round(lifecycle.time_to_first_token_s(*each)) for each in known],
        "tpot_s": [_round(lifecycle.time_per_output_token_s(tokens_s)) for _, tokens_s in known],
        "e2e_s": [_round(lifecycle.end_to_end_s(*each)) for each in known],
        "longest_gap_s": [
            _round(max(lifecycle.inter_token_latencies_s(tokens_s), default=0.0)) for _, tokens_s in known
        ],
    }


def _round(seconds: float | None) -> float:
    return round(seconds or 0.0, 4)


def _num_good(runs: Runs) -> int:
    """Requests that met both goals of their run."""
    return sum(
        ttft_s <= run["goals_s"][0] and tpot_s <= run["goals_s"][1]
        for run in runs
        for ttft_s, tpot_s in zip(run["ttft_s"], run["tpot_s"], strict=True)
    )


def _attained(runs: Runs) -> float | None:
    num_requests = sum(len(run["ttft_s"]) + run.get("failed", 0) for run in runs)
    return _num_good(runs) / num_requests if num_requests else None


def _rate(count: float, runs: Runs) -> float | None:
    duration_s = float(sum(run["duration_s"] for run in runs))
    return count / duration_s if duration_s > 0 else None


def _quantile(runs: Runs, key: str, quantile: float) -> float | None:
    values = [value for run in runs for value in run[key]]
    return float(np.quantile(values, quantile)) if values else None


def _mean_longest_gap(runs: Runs) -> float | None:
    longest = [max(run["longest_gap_s"]) for run in runs if run["longest_gap_s"]]
    return float(np.mean(longest)) if longest else None


def _column(keys: Sequence[str], formula: Formula) -> Formula:
    """The formula, or None if there is no run or a run lacks one of the keys."""

    def value(runs: Runs) -> float | None:
        is_known = bool(runs) and all(run.get(key) is not None for run in runs for key in keys)
        return formula(runs) if is_known else None

    return value


def _quantiles(label: str, key: str) -> dict[str, Formula]:
    return {
        f"{label} p50": _column([key], lambda runs: _quantile(runs, key, 0.5)),
        f"{label} p99": _column([key], lambda runs: _quantile(runs, key, 0.99)),
    }


GOAL_KEYS = ("goals_s", "ttft_s", "tpot_s")

COLUMNS: Mapping[str, Formula] = {
    "attained": _column(GOAL_KEYS, _attained),
    "goodput": _column([*GOAL_KEYS, "duration_s"], lambda runs: _rate(_num_good(runs), runs)),
    **_quantiles("TTFT", "ttft_s"),
    **_quantiles("TPOT", "tpot_s"),
    **_quantiles("E2E", "e2e_s"),
    "longest gap": _column(["longest_gap_s"], _mean_longest_gap),
    "tokens/s": _column(
        ["output_tokens", "duration_s"], lambda runs: _rate(sum(run["output_tokens"] for run in runs), runs)
    ),
}
"""*Attained*: the share of requests within both goals; *goodput*: those a second. The longest gap is the mean over
runs: where one way has more runs than another, the greatest of more would be greater."""

COUNTS: Mapping[str, Formula] = {
    "preemptions": _column(["preemptions"], lambda runs: float(np.mean([run["preemptions"] for run in runs]))),
    "recomputed": _column(
        ["recomputed_tokens"], lambda runs: float(np.mean([run["recomputed_tokens"] for run in runs]))
    ),
}
"""Means over runs: preempted requests, and tokens whose KV was recomputed."""


def format_cell(name: str, value: float | None, base: float | None = None) -> str:
    """Return the value of a column for a table, with its unit; ``-`` for a missing one.

    Args:
        name: The column's name.
        value: The value of a way.
        base: The baseline's value: then the ratio to it is shown first, except for *attained* and counts. None: no
            ratio.
    """
    if value is None:
        return MISSING
    if name == "attained":
        return f"{value:.0%}"
    if name in COUNTS:
        return f"{value:.0f}"
    unit = "/s" if name == "goodput" else "" if name == "tokens/s" else " s"
    absolute = f"{value:.{3 if name.startswith('TPOT') else 2}f}{unit}"
    if base is None:
        return absolute
    return f"{value / base if base else float('inf'):.2f}x ({absolute})"


def format_ways(ways: Mapping[str, Runs], columns: Mapping[str, Formula] = COLUMNS) -> list[str]:
    """Return the lines of a Markdown table: a row for each way, the first one absolute, the others as ratios to it."""
    base = next(iter(ways.values()))
    lines = ["| way | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for way, runs in ways.items():
        cells = [
            format_cell(name, column(runs), None if runs is base else column(base)) for name, column in columns.items()
        ]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return lines
