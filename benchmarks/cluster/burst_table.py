"""Tables of the burst benchmark: what arms gave in each load, what drops and restores took, and the aims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

SLO = 5.0
"""A goal is so many times the median of the baseline without load."""
Run = Mapping[str, Any]
Measure = Callable[[Run], float | None]


def quantile(key: str, part: float) -> Measure:
    """A quantile of a run's latencies, in seconds; None if no request was answered."""
    return lambda run: float(np.quantile(run[key], part)) if run[key] else None


MEASURES: Mapping[str, Measure] = {
    "burst tokens/s": lambda run: run["burst_tokens_s"],
    "TTFT p50": quantile("ttft_s", 0.5),
    "TTFT p99": quantile("ttft_s", 0.99),
    "TPOT p50": quantile("tpot_s", 0.5),
    "TPOT p99": quantile("tpot_s", 0.99),
    "E2E p50": quantile("e2e_s", 0.5),
    "E2E p99": quantile("e2e_s", 0.99),
    "tokens/s": lambda run: run["output_tokens"] / run["duration_s"],
}


def goals_of(runs: Sequence[Run]) -> tuple[float, float]:
    """Goals of TTFT and of TPOT, in seconds, from the baseline's probes before the load."""
    base = [run["before"] for run in runs if run["arm"] == baseline_of(runs)]
    return SLO * median(one["ttft_s"] for one in base), SLO * median(one["tpot_s"] for one in base)


def baseline_of(runs: Sequence[Run]) -> str:
    """The arm that others are compared with."""
    names = [str(run["arm"]) for run in runs]
    return "recompute" if "recompute" in names else names[0]


def attainment(run: Run, goals: tuple[float, float]) -> dict[str, float]:
    """The parts of all requests that met the goal of TTFT, of TPOT, of both; and of E2E, which follows from both."""
    ttft, tpot, e2e = (np.array(run[key]) for key in ("ttft_s", "tpot_s", "e2e_s"))
    limits = goals[0] + (np.array(run["num_tokens"]) - 1) * goals[1]
    count = len(ttft) + run["failed"]
    met = {"TTFT": ttft <= goals[0], "TPOT": tpot <= goals[1], "E2E": e2e <= limits}
    met["both"] = met["TTFT"] & met["TPOT"]
    return {name: float(good.sum()) / count for name, good in met.items()}


def first_late_s(run: Run, goals: tuple[float, float]) -> float | None:
    """When the first request was sent that missed the goal of TTFT; None if none did."""
    late = [sent for sent, ttft in zip(run["sent_s"], run["ttft_s"], strict=True) if ttft > goals[0]]
    return min(late, default=None)


def ratios(runs: Sequence[Run], arm: str, other: str, name: str) -> list[float]:
    """A measure of one arm over that of another one, round by round."""
    found = {(run["arm"], run["round"]): MEASURES[name](run) for run in runs if run["arm"] in (arm, other)}
    rounds = sorted({round_ for _, round_ in found})
    pairs = [(found.get((arm, round_)), found.get((other, round_))) for round_ in rounds]
    return [mine / base for mine, base in pairs if mine is not None and base]


def noise_of(runs: Sequence[Run], name: str) -> float | None:
    """The greatest value of the baseline's over its least one; None with one round."""
    values = [MEASURES[name](run) for run in runs if run["arm"] == baseline_of(runs)]
    known = [value for value in values if value]
    return max(known) / min(known) if len(known) > 1 else None


def _spread(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{median(known):.{digits}f}"
    return middle if len(known) == 1 else f"{middle} ({min(known):.{digits}f}-{max(known):.{digits}f})"


def _by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    return {arm: [run for run in runs if run["arm"] == arm] for arm in dict.fromkeys(run["arm"] for run in runs)}


def format_arms(runs: Sequence[Run]) -> list[str]:
    """A row for each arm: medians over rounds, with the least and the greatest."""
    goals = goals_of(runs)
    lines = [
        f"Goals: TTFT {goals[0]:.2f} s, TPOT {1e3 * goals[1]:.0f} ms ({SLO:g} times the baseline without load).",
        "",
        "| arm | " + " | ".join(MEASURES) + " | SLO: TTFT | TPOT | both | E2E | preempted | equal | engine's |",
        "|---" * (len(MEASURES) + 8) + "|",
    ]
    for arm, ours in _by_arm(runs).items():
        cells = [
            _spread([measure(run) for run in ours], 0 if "tokens" in name else 3 if "TPOT" in name else 2)
            for name, measure in MEASURES.items()
        ]
        met = [attainment(run, goals) for run in ours]
        cells += [f"{median(one[name] for one in met):.0%}" for name in ("TTFT", "TPOT", "both", "E2E")]
        cells.append(f"{median(run['preemptions'] for run in ours):.0f}")
        for key in ("equal", "equal_engine"):
            cells.append(" of ".join(str(sum(run[key][part] for run in ours)) for part in (0, 1)))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def format_bursts(runs: Sequence[Run]) -> list[str]:
    """TTFT p99 of requests sent in each burst, where there are several of them, and when the first one was late."""
    goals, num_bursts = goals_of(runs), len(runs[0]["bursts"])
    heads = [f"TTFT p99, burst {number + 1}" for number in range(num_bursts)] if num_bursts > 1 else []
    lines = ["| arm | first late TTFT, sent at (s) | " + " | ".join([*heads, "last answer (s)"]) + " |"]
    lines.append("|---" * (len(heads) + 3) + "|")
    for arm, ours in _by_arm(runs).items():
        cells = [_spread([first_late_s(run, goals) for run in ours], 1)]
        for number in range(len(heads)):
            cells.append(_spread([_ttft_p99_of(run, *run["bursts"][number]) for run in ours]))
        cells.append(_spread([run["duration_s"] for run in ours], 1))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _ttft_p99_of(run: Run, begin_s: float, end_s: float) -> float | None:
    pairs = zip(run["sent_s"], run["ttft_s"], strict=True)
    values = [ttft for sent, ttft in pairs if begin_s <= sent < end_s]
    return float(np.quantile(values, 0.99)) if values else None


def format_groups(runs: Sequence[Run]) -> list[str]:
    """What drops and restores took; TPOT without load after the load over that before it, in all arms."""
    lines = [
        "| arm | drops | usable (s) | settled | restored | carried | computed again | restored at the end "
        "| TPOT after / before |",
        "|---" * 9 + "|",
    ]
    for arm, ours in _by_arm(runs).items():
        groups = [run["group"] for run in ours if run["group"]]
        cells = [f"{sum(one['changes']['dropped'] for one in groups):.0f}" if groups else "-"]
        cells += [_spread([one[key] for one in groups]) for key in ("usable_s", "settled_s", "restored_s")]
        cells += [_spread([one[key] for one in groups], 0) for key in ("carried", "recomputed")]
        ends = [run["is_restored"] for run in ours if run["is_restored"] is not None]
        cells.append(f"{sum(ends)} of {len(ends)}" if ends else "-")
        cells.append(_spread([run["after"]["tpot_s"] / run["before"]["tpot_s"] for run in ours], 3))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


AIMS = (
    ("TTFT p99", "recompute", "at most 0.2x", 0.2, False),
    ("burst tokens/s", "paced", "at least 1.15x", 1.15, True),
    ("E2E p99", "paced", "at most 0.8x", 0.8, False),
)
"""Measure, compared with which arm, the aim in words and as a number, whether more is better."""


def format_aims(runs: Sequence[Run], arm: str) -> list[str]:
    """Each aim beside what an arm gave: the median of the ratios of each round."""
    lines = []
    for name, other, words, aim, is_more in AIMS:
        found = ratios(runs, arm, other, name)
        if found:
            value = median(found)
            verdict = "met" if (value >= aim if is_more else value <= aim) else "missed"
            noise = noise_of(runs, name)
            beside = "" if noise is None else f"; the baseline itself varies by {noise:.2f}x"
            lines.append(f"- `{arm}` against `{other}`, {name}: {_spread(found)}x, aim {words}: {verdict}{beside}")
    return lines


def format_report(runs: Sequence[Run]) -> str:
    """All tables, load by load."""
    lines = []
    for load in dict.fromkeys(run["load"] for run in runs):
        ours = [run for run in runs if run["load"] == load]
        rounds = len({run["round"] for run in ours})
        lines += [f"\n## {load}, {rounds} round{'s' if rounds > 1 else ''}, {len(ours[0]['ttft_s'])} requests\n"]
        lines += [*format_arms(ours), "", *format_bursts(ours), "", *format_groups(ours), ""]
        arms = [arm for arm, mine in _by_arm(ours).items() if any(run["group"] for run in mine)]
        lines += [line for arm in arms for line in format_aims(ours, arm)]
    return "\n".join(lines)
