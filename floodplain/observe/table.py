"""Tables for the terminal, and the rows of every summary of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from floodplain.core.printable import printable

SUMMARY: tuple[tuple[str, str, float], ...] = (
    ("TTFT p50 (s)", "median_ttft_ms", 1e-3),
    ("TTFT p99 (s)", "p99_ttft_ms", 1e-3),
    ("TTFT max (s)", "max_ttft_ms", 1e-3),
    ("TPOT p50 (ms)", "median_tpot_ms", 1.0),
    ("TPOT p99 (ms)", "p99_tpot_ms", 1.0),
    ("E2E p50 (s)", "median_e2el_ms", 1e-3),
    ("E2E p99 (s)", "p99_e2el_ms", 1e-3),
    ("longest gap (s)", "floodplain.max_token_gap_s", 1.0),
    ("goals met (%)", "slo_attainment", 100.0),
    ("goodput (requests/s)", "request_goodput", 1.0),
    ("tokens/s", "output_throughput", 1.0),
    ("done", "completed", 1.0),
    ("failed", "failed", 1.0),
    ("preempted", "floodplain.preemptions", 1.0),
    ("recomputed (tokens)", "floodplain.recomputed_tokens", 1.0),
    ("swap-in (MB)", "floodplain.swap.in_bytes", 1e-6),
    ("stalled (s)", "floodplain.swap.stall_s", 1.0),
)
"""(heading, key of a benchmark result, factor from the key's unit to the heading's)."""


def lookup(result: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted key; None if any part is missing."""
    value: Any = result
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def format_number(value: float | None) -> str:
    """Return a number with about three significant digits; ``-`` for None, NaN or infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def summary_table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows with a column for each (name, benchmark result), which stays narrow on a terminal."""
    rows = []
    for heading, key, factor in SUMMARY:
        values = [lookup(result, key) for _, result in runs]
        rows.append([heading, *(format_number(None if value is None else value * factor) for value in values)])
    return ["run", *(name for name, _ in runs)], rows


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table: the first column to the left, the others to the right; no cell has a line break."""
    lines = [[printable(cell) for cell in cells] for cells in (headings, *rows)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    top, *body = map(line, lines)
    return "\n".join([top, "  ".join("-" * width for width in widths), *body])
