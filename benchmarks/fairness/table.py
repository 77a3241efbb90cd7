"""The table of a comparison: pooled requests of all seeds, as ratios to FCFS under the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ways import BASELINE

VOID_BELOW_S = 5.0
"""A burst under which FCFS keeps its TTFT p99 below this shows nothing."""

Runs = Sequence[dict[str, Any]]

COLUMNS: dict[str, Callable[[Runs], float]] = {
    "TTFT p50": lambda runs: _quantile(runs, "ttft_s", 0.5),
    "TTFT p99": lambda runs: _quantile(runs, "ttft_s", 0.99),
    "E2E p50": lambda runs: _quantile(runs, "e2e_s", 0.5),
    "E2E p99": lambda runs: _quantile(runs, "e2e_s", 0.99),
    "longest gap": lambda runs: float(np.mean([max(run["longest_gap_s"]) for run in runs])),
    "tokens/s": lambda runs: sum(run["output_tokens"] for run in runs) / sum(run["duration_s"] for run in runs),
}


def format_table(runs: Runs) -> str:
    """One block for each load: a row for each way, absolute for FCFS, ratios for the others, and the noise floor.

    The longest gap is the mean over runs: FCFS has more runs, and the greatest of more is greater.
    """
    lines = []
    for load, capacity in dict.fromkeys((run["load"], run["capacity"]) for run in runs):
        of_load = [run for run in runs if (run["load"], run["capacity"]) == (load, capacity)]
        base = [run for run in of_load if run["way"] == BASELINE]
        if not base:
            continue
        seeds = sorted({run["seed"] for run in of_load})
        lines += ["", f"**{load}**, capacity {capacity:.2f}/s, seeds {seeds}{_void(load, base)}", "", _head()]
        lines.append("|---" * (len(COLUMNS) + 4) + "|")
        for way in dict.fromkeys(run["way"] for run in of_load):
            lines.append(_row(way, [run for run in of_load if run["way"] == way], base))
            if way == BASELINE:
                lines.append(_noise_row(base))
    return "\n".join(lines)


def _head() -> str:
    return "| way | " + " | ".join(COLUMNS) + " | preempted a run | recomputed tokens a run | stall |"


def _row(way: str, runs: Runs, base: Runs) -> str:
    """A seed weighs as much on both sides of a ratio, however often FCFS ran it."""
    seeds = {run["seed"] for run in runs}
    same = [run for run in base if run["seed"] in seeds]
    alike = base if way == BASELINE else [run for run in runs for other in same if other["seed"] == run["seed"]]
    cells = [_cell(name, column(alike), column(same), way == BASELINE) for name, column in COLUMNS.items()]
    cells += [f"{np.mean([run['engine'][key] for run in runs]):.0f}" for key in ("preemptions", "recomputed_tokens")]
    stall_s = sum(run["engine"]["swap"]["stall_s"] for run in runs)
    cells.append(f"{stall_s / sum(run['duration_s'] for run in runs):.2%}")
    return f"| {way} | " + " | ".join(cells) + " |"


def _noise_row(base: Runs) -> str:
    """Every single run of FCFS as a ratio to all of its seed's: the least and the greatest."""
    cells = []
    for column in COLUMNS.values():
        ratios = [column([run]) / column([other for other in base if other["seed"] == run["seed"]]) for run in base]
        cells.append(f"{min(ratios):.2f}-{max(ratios):.2f}x")
    return f"| each run of {BASELINE} | " + " | ".join(cells) + " | | | |"


def _cell(name: str, value: float, base: float, is_base: bool) -> str:
    unit = "" if name == "tokens/s" else " s"
    if is_base:
        return f"{value:.2f}{unit}"
    return f"{value / base:.3f}x ({value:.2f}{unit})"


def _void(load: str, base: Runs) -> str:
    p99 = COLUMNS["TTFT p99"](base)
    return f" (void: FCFS's TTFT p99 is {p99:.1f} s)" if load == "burst" and p99 < VOID_BELOW_S else ""


def _quantile(runs: Runs, key: str, quantile: float) -> float:
    return float(np.quantile(np.concatenate([run[key] for run in runs]), quantile))
