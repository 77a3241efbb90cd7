"""The tables of the comparison: who meets both goals under which load, and all columns of each load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.peers.reading import effective_rate, mean_unhidden_s
from benchmarks.run_columns import COLUMNS, COUNTS, Formula, format_cell

Run = Mapping[str, Any]
Row = Mapping[str, Any]
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
MORE_IS_BETTER = ("attained", "effective tokens/s", "tokens/s")


def pool(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each load and way: its columns over all seeds, and ``attained_by_seed``."""
    return [
        {
            "load": load, "way": way, **{name: _round(column(chosen)) for name, column in SHOWN.items()},
            "attained_by_seed": {run["seed"]: _round(COLUMNS["attained"]([run])) for run in chosen},
        }
        for load, way in dict.fromkeys((run["load"], run["way"]) for run in runs)
        for chosen in [[run for run in runs if (run["load"], run["way"]) == (load, way)]]
    ]  # fmt: skip


def _round(value: float | None) -> float | None:
    return value if value is None else round(value, 5)


def summarise(run: Run) -> str:
    """Return one line with the columns of a run."""
    return ", ".join(f"{name} {_cell(name, pool([run])[0])}" for name in SHOWN)


def format_all(rows: Sequence[Row]) -> str:
    """Return the table of attainment, the comparison with the best peer, and a table for each load."""
    ways, loads = (list(dict.fromkeys(row[key] for row in rows)) for key in ("way", "load"))
    shares = {(row["way"], row["load"]): row["attained"] for row in rows}
    lines = [f"| way | {' | '.join(loads)} | mean |", "|---" * (len(loads) + 2) + "|"]
    for way in ways:
        each = [shares[way, load] for load in loads]
        lines.append(f"| {way} | {' | '.join(f'{share:.0%}' for share in each)} | {mean(each):.0%} |")
    if OURS in ways:
        lines += ["", *_compare(shares, [way for way in ways if way not in IS_OURS], loads)]
        lines += ["", *_list_losses(rows)]
    for load in loads:
        lines += ["", f"**{load}**", "", *format_columns([row for row in rows if row["load"] == load])]
    return "\n".join(lines)


def format_columns(rows: Sequence[Row]) -> list[str]:
    """Return a table with all columns of the ways under one load."""
    lines = [f"| way | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    return lines + [f"| {row['way']} | {' | '.join(_cell(name, row) for name in SHOWN)} |" for row in rows]


def _compare(shares: Mapping[tuple[str, str], float], peers: Sequence[str], loads: Sequence[str]) -> list[str]:
    """Compare our share of requests within both goals with that of the best peer, by load and on the mean."""
    if not peers:
        return []
    lines = [f"| load | best peer | its share | {OURS} | ratio |", "|---|---|---|---|---|"]
    for load in loads:
        best = max(peers, key=lambda way: shares[way, load])
        lines.append(_compare_line(load, best, shares[best, load], shares[OURS, load]))
    means = {way: mean(shares[way, load] for load in loads) for way in [*peers, OURS]}
    best = max(peers, key=lambda way: means[way])
    return [*lines, _compare_line("mean of the loads", best, means[best], means[OURS])]


def _compare_line(load: str, best: str, theirs: float, ours: float) -> str:
    return f"| {load} | {best} | {theirs:.0%} | {ours:.0%} | {ours / theirs:.2f}x |"


def _list_losses(rows: Sequence[Row]) -> list[str]:
    """List for each column the loads on which a peer is better than ours, with the best one."""
    lines = [f"| column | loads on which a peer is better: the best one, its value for {OURS}'s |", "|---|---|"]
    for name in SHOWN:
        sign = -1 if name in MORE_IS_BETTER else 1
        losses = []
        for load in dict.fromkeys(row["load"] for row in rows):
            each = [row for row in rows if row["load"] == load and row["way"] not in IS_OURS]
            [ours] = [row for row in rows if row["load"] == load and row["way"] == OURS]
            best = min([ours, *each], key=lambda row: sign * row[name])
            if _cell(name, best) != _cell(name, ours):
                losses.append(f"{load}: {best['way']} {_cell(name, best)} for {_cell(name, ours)}")
        lines.append(f"| {name} | {'; '.join(losses) or 'none'} |")
    return lines


def _cell(name: str, row: Row) -> str:
    if name == "effective tokens/s":
        return f"{row[name]:.0f}"
    return format_cell(name, row[name])
