"""What a reader notices: silence that no unread token hides, and tokens that come before their deadline.

A reader begins with the first token and reads one token in each TPOT goal, as soon as it is there. The deadline of
token ``k`` (from 0) is the arrival, plus the TTFT goal, plus ``k`` TPOT goals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.run_columns import Runs


def unhidden_silence_s(token_times_s: Sequence[float], tpot_goal_s: float) -> float:
    """Return the time after the first token in which the reader waits, in seconds."""
    silence_s, ready_s = 0.0, token_times_s[0]
    for time_s in token_times_s[1:]:
        ready_s += tpot_goal_s
        silence_s += max(0.0, time_s - ready_s)
        ready_s = max(ready_s, time_s)
    return silence_s


def count_timely(arrival_s: float, token_times_s: Sequence[float], goals_s: Sequence[float]) -> int:
    """Return the tokens that came before their deadline. ``goals_s``: TTFT, TPOT."""
    ttft_s, tpot_s = goals_s
    return sum(time_s <= arrival_s + ttft_s + number * tpot_s for number, time_s in enumerate(token_times_s))


def reading_lists(times: Iterable[tuple[float, Sequence[float]]], goals_s: Sequence[float]) -> dict[str, Any]:
    """Return the part of a run that readers notice: ``unhidden_s`` of each request, and ``timely_tokens``.

    Args:
        times: (arrival, time of each token) of each request, in seconds.
        goals_s: TTFT, TPOT.
    """
    known = list(times)
    return {
        "unhidden_s": [round(unhidden_silence_s(tokens_s, goals_s[1]), 4) for _, tokens_s in known],
        "timely_tokens": sum(count_timely(*each, goals_s) for each in known),
    }


def mean_unhidden_s(runs: Runs) -> float | None:
    """Return the mean over all answered requests; None if there is none."""
    values = [value for run in runs for value in run["unhidden_s"]]
    return float(np.mean(values)) if values else None


def effective_rate(runs: Runs) -> float:
    """Return the timely tokens per second."""
    return float(sum(run["timely_tokens"] for run in runs) / sum(run["duration_s"] for run in runs))
