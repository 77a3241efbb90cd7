"""The table of a comparison: pooled requests of all seeds, as ratios to the baseline under the same requests.

The machine's speed wanders, so only runs of one process are compared: in it the ways took turns on the machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.fairness.ways import BASELINE
from benchmarks.run_columns import COLUMNS, Runs, format_cell

QUIET = "quiet"
"""The load without pressure."""


def format_table(runs: Runs) -> str:
    """One block for each load: a row for each way, absolute for the baseline, ratios for the others, and the noise.

    A process in which the load was none, or too much for a quiet one, is named and left out.
    """
    lines: list[str] = []
    for load, capacity in dict.fromkeys((run["load"], run["capacity"]) for run in runs):
        of_load = [run for run in runs if (run["load"], run["capacity"]) == (load, capacity)]
        reasons = {process: void_reason(load, _of(of_load, process, BASELINE)) for process in _processes(of_load)}
        valid = [run for run in of_load if not reasons[run["process"]]]
        seeds = sorted({run["seed"] for run in valid})
        lines += ["", f"**{load}**, capacity {capacity:.2f}/s, seeds {', '.join(map(str, seeds)) or 'none'}"]
        lines += [f"void: {reason}" for reason in reasons.values() if reason]
        if valid:
            lines += ["", *_rows(valid)]
    return "\n".join(lines)


def void_reason(load: str, base: Runs) -> str | None:
    """Why a process's runs show nothing of what ``load`` is for; None if they do."""
    if not base:
        return "the baseline is missing"
    if load == QUIET:
        num_preempted = sum(run["engine"]["preemptions"] for run in base)
        return f"seed {base[0]['seed']}, the baseline preempted {num_preempted} times" if num_preempted else None
    p99_s, goal_s = COLUMNS["TTFT p99"](base), base[0]["goals_s"][0]
    kept = f"seed {base[0]['seed']}, the baseline's TTFT p99 of {p99_s:.1f} s is within the goal of {goal_s:.1f} s"
    return kept if p99_s <= goal_s else None


def _rows(runs: Runs) -> list[str]:
    more = ["preempted a run", "recomputed tokens a run", "stall"]
    lines = ["| way | " + " | ".join([*COLUMNS, *more]) + " |", "|---" * (len(COLUMNS) + len(more) + 1) + "|"]
    base = [run for run in runs if run["way"] == BASELINE]
    for way in sorted({run["way"] for run in runs}, key=lambda way: (way != BASELINE, way)):
        lines.append(_row(way, [run for run in runs if run["way"] == way], base))
        if way == BASELINE:
            lines.append(_noise_row(base, len(more)))
    return lines


def _row(way: str, runs: Runs, base: Runs) -> str:
    """A process weighs as much on both sides of a ratio, however often the baseline ran in it."""
    same = [run for run in base if run["process"] in _processes(runs)]
    alike = [run for run in runs for other in same if other["process"] == run["process"]]
    alike = list(runs) if way == BASELINE else alike
    cells = [
        format_cell(name, column(alike), None if way == BASELINE else column(same)) for name, column in COLUMNS.items()
    ]
    engines = [run["engine"] for run in runs]
    cells += [f"{np.mean([one[key] for one in engines]):.0f}" for key in ("preemptions", "recomputed_tokens")]
    stall_s = sum(one["swap"]["stall_s"] for one in engines)
    cells.append(f"{stall_s / sum(run['duration_s'] for run in runs):.2%}")
    return f"| {way} | " + " | ".join(cells) + " |"


def _noise_row(base: Runs, num_more: int) -> str:
    """Every run of the baseline as a ratio to the others of its process, pooled: the least and the greatest."""
    cells = []
    for column in COLUMNS.values():
        pairs = [(column([run]), column(rest)) for run in base if (rest := _others(run, base))]
        ratios = [one / other if other else float("inf") for one, other in pairs]
        cells.append(f"{min(ratios):.2f}-{max(ratios):.2f}x" if ratios else "")
    return f"| {BASELINE} beside itself | " + " | ".join([*cells, *[""] * num_more]) + " |"


def _others(run: dict[str, Any], base: Runs) -> Runs:
    return [other for other in base if other["process"] == run["process"] and other is not run]


def _of(runs: Runs, process: str, way: str) -> Runs:
    return [run for run in runs if run["process"] == process and run["way"] == way]


def _processes(runs: Runs) -> list[str]:
    return list(dict.fromkeys(run["process"] for run in runs))
