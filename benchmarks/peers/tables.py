"""The tables of the comparison: who meets both goals under which load, and all columns of each load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.peers.reading import effective_rate, mean_unhidden_s
from benchmarks.run_columns import COLUMNS, COUNTS, Formula, format_cell

Run = Mapping[str, Any]
OURS = "timely"
"""The way that peers are compared with: our plug-in's default."""
IS_OURS = ("timely", "paced", "timely, no swap", "paced, no swap")
SHOWN: Mapping[str, Formula] = {
    **{name: COLUMNS[name] for name in ("attained", "TTFT p50", "TTFT p99", "TPOT p99", "E2E p50", "E2E p99")},
    "longest gap": COLUMNS["longest gap"],
    "unhidden silence": mean_unhidden_s,
    "effective tokens/s": effective_rate,
    "tokens/s": COLUMNS["tokens/s"],
    "recomputed": COUNTS["recomputed"],
}
"""Pooled over seeds; the longest gap and the recomputed tokens are means over seeds."""


def summarise(runs: Sequence[Run]) -> str:
    """Return one line with the columns of some runs."""
    return ", ".join(f"{name} {_cell(name, runs)}" for name in SHOWN)


def format_all(runs: Sequence[Run]) -> str:
    """Return the table of attainment, the comparison with the best peer, and a table for each load."""
    ways, loads = (list(dict.fromkeys(run[key] for run in runs)) for key in ("way", "load"))
    lines = [f"| way | {' | '.join(loads)} | mean |", "|---" * (len(loads) + 2) + "|"]
    for way in ways:
        shares = [attained(runs, way, load) for load in loads]
        lines.append(f"| {way} | {' | '.join(f'{share:.0%}' for share in shares)} | {mean(shares):.0%} |")
    if OURS in ways:
        lines += ["", *_compare(runs, [way for way in ways if way not in IS_OURS], loads)]
    for load in loads:
        lines += ["", f"**{load}**", "", f"| way | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
        for way in ways:
            cells = [_cell(name, select(runs, way, load)) for name in SHOWN]
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _compare(runs: Sequence[Run], peers: Sequence[str], loads: Sequence[str]) -> list[str]:
    """Compare our share of requests within both goals with that of the best peer, by load and on the mean."""
    if not peers:
        return []
    lines = [f"| load | best peer | its share | {OURS} | ratio |", "|---|---|---|---|---|"]
    for load in loads:
        best = max(peers, key=lambda way: attained(runs, way, load))
        theirs, ours = attained(runs, best, load), attained(runs, OURS, load)
        lines.append(f"| {load} | {best} | {theirs:.0%} | {ours:.0%} | {ours / theirs:.2f}x |")
    shares = {way: mean(attained(runs, way, load) for load in loads) for way in [*peers, OURS]}
    best = max(peers, key=lambda way: shares[way])
    ratio = shares[OURS] / shares[best]
    lines.append(f"| mean of the loads | {best} | {shares[best]:.0%} | {shares[OURS]:.0%} | {ratio:.2f}x |")
    return lines


def select(runs: Sequence[Run], way: str, load: str) -> list[Run]:
    """Return the runs of a way under a load."""
    return [run for run in runs if (run["way"], run["load"]) == (way, load)]


def attained(runs: Sequence[Run], way: str, load: str) -> float:
    """Return the share of requests that met both goals."""
    share = COLUMNS["attained"](select(runs, way, load))
    assert share is not None
    return share


def _cell(name: str, runs: Sequence[Run]) -> str:
    value = SHOWN[name](runs)
    if name == "effective tokens/s":
        return f"{value:.0f}"
    return format_cell(name, value)
