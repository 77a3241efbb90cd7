"""The table of a comparison: pooled requests of all seeds, as ratios to the baseline under the same requests.

The machine's speed wanders, so only runs of one process are compared: in it the ways took turns on the machine. Servers
(``servers.py``) run one after the other, and what they differ by may be the machine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ways import BASELINE

VOID_BELOW_S = 5.0
"""A load under which the baseline keeps its TTFT p99 below this shows nothing."""

QUIET = "quiet"
"""The load that shall put nobody under pressure."""

Runs = Sequence[dict[str, Any]]

COLUMNS: dict[str, Callable[[Runs], float]] = {
    "TTFT p50": lambda runs: _quantile(runs, "ttft_s", 0.5),
    "TTFT p99": lambda runs: _quantile(runs, "ttft_s", 0.99),
    "E2E p50": lambda runs: _quantile(runs, "e2e_s", 0.5),
    "E2E p99": lambda runs: _quantile(runs, "e2e_s", 0.99),
    "longest gap": lambda runs: float(np.mean([max(run["longest_gap_s"]) for run in runs])),
    "tokens/s": lambda runs: sum(run["output_tokens"] for run in runs) / sum(run["duration_s"] for run in runs),
}
"""The longest gap is the mean over runs: the baseline has more runs, and the greatest of more is greater."""


def format_table(runs: Runs, baseline: str = BASELINE) -> str:
    """One block for each load: a row for each way, absolute for the baseline, ratios for the others, and the noise.

    A process in which the load was none, or too much for a quiet one, is named and left out.
    """
    lines: list[str] = []
    for load, capacity in dict.fromkeys((run["load"], run["capacity"]) for run in runs):
        of_load = [run for run in runs if (run["load"], run["capacity"]) == (load, capacity)]
        reasons = {process: void_reason(load, _of(of_load, process, baseline)) for process in _processes(of_load)}
        valid = [run for run in of_load if not reasons[run["process"]]]
        seeds = sorted({run["seed"] for run in valid})
        lines += ["", f"**{load}**, capacity {capacity:.2f}/s, seeds {', '.join(map(str, seeds)) or 'none'}"]
        lines += [f"void: {reason}" for reason in reasons.values() if reason]
        if valid:
            lines += ["", *_rows(valid, baseline)]
    return "\n".join(lines)


def void_reason(load: str, base: Runs) -> str | None:
    """Why a process's runs show nothing of what ``load`` is for; None if they do."""
    if not base:
        return "the baseline is missing"
    if load == QUIET:
        num_preempted = sum(run["engine"]["preemptions"] for run in base)
        return f"seed {base[0]['seed']}, the baseline preempted {num_preempted} times" if num_preempted else None
    p99_s = COLUMNS["TTFT p99"](base)
    return f"seed {base[0]['seed']}, the baseline's TTFT p99 is {p99_s:.1f} s" if p99_s < VOID_BELOW_S else None


def _rows(runs: Runs, baseline: str) -> list[str]:
    more = ["preempted a run", "recomputed tokens a run", "stall"] if "engine" in runs[0] else []
    more += ["slowness"] if "slowness" in runs[0] else []
    lines = ["| way | " + " | ".join([*COLUMNS, *more]) + " |", "|---" * (len(COLUMNS) + len(more) + 1) + "|"]
    base = [run for run in runs if run["way"] == baseline]
    for way in sorted({run["way"] for run in runs}, key=lambda way: (way != baseline, way)):
        lines.append(_row(way, [run for run in runs if run["way"] == way], base, baseline))
        if way == baseline:
            lines.append(_noise_row(base, baseline, len(more)))
    return lines


def _row(way: str, runs: Runs, base: Runs, baseline: str) -> str:
    """A process weighs as much on both sides of a ratio, however often the baseline ran in it."""
    same = [run for run in base if run["process"] in _processes(runs)]
    alike = [run for run in runs for other in same if other["process"] == run["process"]]
    alike = list(runs) if way == baseline else alike
    cells = [_cell(name, column(alike), column(same), way == baseline) for name, column in COLUMNS.items()]
    if "engine" in runs[0]:
        engines = [run["engine"] for run in runs]
        cells += [f"{np.mean([one[key] for one in engines]):.0f}" for key in ("preemptions", "recomputed_tokens")]
        stall_s = sum(one["swap"]["stall_s"] for one in engines)
        cells.append(f"{stall_s / sum(run['duration_s'] for run in runs):.2%}")
    if "slowness" in runs[0]:
        cells.append(f"{np.mean([run['slowness'] for run in runs]):.2f}")
    return f"| {way} | " + " | ".join(cells) + " |"


def _noise_row(base: Runs, baseline: str, num_more: int) -> str:
    """Every run of the baseline as a ratio to the others of its process, pooled: the least and the greatest."""
    cells = []
    for column in COLUMNS.values():
        ratios = [column([run]) / column(rest) for run in base if (rest := _others(run, base))]
        cells.append(f"{min(ratios):.2f}-{max(ratios):.2f}x" if ratios else "")
    return f"| {baseline} beside itself | " + " | ".join([*cells, *[""] * num_more]) + " |"


def _others(run: dict[str, Any], base: Runs) -> Runs:
    return [other for other in base if other["process"] == run["process"] and other is not run]


def _of(runs: Runs, process: str, way: str) -> Runs:
    return [run for run in runs if run["process"] == process and run["way"] == way]


def _processes(runs: Runs) -> list[str]:
    return list(dict.fromkeys(run["process"] for run in runs))


def _cell(name: str, value: float, base: float, is_base: bool) -> str:
    unit = "" if name == "tokens/s" else " s"
    if is_base:
        return f"{value:.2f}{unit}"
    return f"{value / base:.3f}x ({value:.2f}{unit})"


def _quantile(runs: Runs, key: str, quantile: float) -> float:
    return float(np.quantile(np.concatenate([run[key] for run in runs]), quantile))
