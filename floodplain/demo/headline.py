"""The demo's answer in three numbers: one way beside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floodplain.observe.table import format_number, format_table, lookup

NUMBERS = (
    ("requests that met both goals", "slo_attainment", 100.0, "%"),
    ("first token, TTFT p99", "p99_ttft_ms", 1e-3, "s"),
    ("whole answer, E2E p50", "median_e2el_ms", 1e-3, "s"),
)
"""(words, key of a benchmark result, factor to the unit, unit)."""


def headline(runs: Sequence[tuple[str, Mapping[str, Any]]], ours: str, other: str) -> dict[str, Any]:
    """``headline`` of ``demo.json``: the numbers of two runs; a number that does not exist is null."""
    results = dict(runs)

    def value(name: str, key: str, factor: float) -> float | None:
        known = lookup(results[name], key)
        return None if known is None else known * factor

    return {
        "ours": ours,
        "other": other,
        "numbers": [
            {"name": words, "unit": unit, "ours": value(ours, key, factor), "other": value(other, key, factor)}
            for words, key, factor, unit in NUMBERS
        ],
    }


def headline_rows(head: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table of the numbers, with their units."""
    return ["", head["ours"], head["other"]], [
        [number["name"], *(f"{format_number(number[side])} {number['unit']}" for side in ("ours", "other"))]
        for number in head["numbers"]
    ]


def describe_headline(head: Mapping[str, Any]) -> str:
    """The numbers for a terminal."""
    return format_table(*headline_rows(head))
