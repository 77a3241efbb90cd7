"""The highest Poisson rate at which FCFS with this pool keeps TTFT p99 under one second, to a few percent.

Probes are long: above what it can sustain, the line grows slowly, and 100 requests end before it shows (a rate of 4.5
requests/s passed so, of which FCFS serves 3.9). And two of three seeds decide: the speed of a shared machine wanders
within minutes, and single probes found anything between 2.0 and 3.5 within a day.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
TTFT_GOAL_S = 1.0
STEP = 1.25
SEEDS = (100, 101, 102)


def ttft_p99_s(rate: float, seed: int) -> float:
    """Of FCFS under 300 Poisson arrivals at ``rate``."""
    command = [sys.executable, str(HERE / "measure.py"), "steady", str(rate), str(seed), "-", "fcfs"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(np.quantile(json.loads(done.stdout)["ttft_s"], 0.99))


def find_capacity(rate: float = 2.5, num_halvings: int = 2) -> tuple[float, list[dict[str, float]]]:
    """(requests per second, every probe): the goal holds at the rate with most seeds, and fails a step above.

    From ``rate`` on it goes up or down in steps of ``STEP`` until one rate holds and the next fails; then it halves the
    step between them.
    """
    probes: list[dict[str, float]] = []
    low = high = rate
    if _holds(rate, probes):
        while _holds(high := low * STEP, probes):
            low = high
    else:
        while not _holds(low := high / STEP, probes):
            high = low
    for _ in range(num_halvings):
        rate = math.sqrt(low * high)
        low, high = (rate, high) if _holds(rate, probes) else (low, rate)
    return low, probes


def _holds(rate: float, probes: list[dict[str, float]]) -> bool:
    """Whether two of the three seeds meet the goal; the third is asked only if the others differ."""
    verdicts: list[bool] = []
    for seed in SEEDS:
        p99 = ttft_p99_s(rate, seed)
        probes.append({"rate": rate, "seed": seed, "ttft_p99_s": p99})
        print(f"capacity: {rate:.2f} req/s, seed {seed}: TTFT p99 {p99:.2f} s", file=sys.stderr, flush=True)
        verdicts.append(p99 < TTFT_GOAL_S)
        if verdicts.count(verdicts[-1]) == 2:
            break
    return verdicts[-1]
