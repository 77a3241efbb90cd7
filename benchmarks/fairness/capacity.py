"""The highest Poisson rate at which FCFS with this pool keeps TTFT p99 under one second, to a few percent.

Probes are long: above what it can sustain, the line grows slowly, and 100 requests end before it shows (a rate of 4.5
requests/s passed so, of which FCFS serves 3.9). Two of three seeds decide, and they take turns on the machine, as the
ways that are compared do: an engine beside others is slower than one that has the machine to itself.
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


def ttft_p99s(rate: float) -> list[float]:
    """Of FCFS under 300 Poisson arrivals at ``rate``, for each of the seeds."""
    seeds = ",".join(map(str, SEEDS))
    command = [sys.executable, str(HERE / "measure.py"), "steady", str(rate), seeds, "-", *["fcfs"] * len(SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(np.quantile(json.loads(line)["ttft_s"], 0.99)) for line in done.stdout.splitlines()]


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
    """Whether most seeds meet the goal."""
    p99s = ttft_p99s(rate)
    probes += [{"rate": rate, "seed": seed, "ttft_p99_s": p99} for seed, p99 in zip(SEEDS, p99s, strict=True)]
    print(
        f"capacity: {rate:.2f} req/s: TTFT p99 {', '.join(f'{p99:.2f}' for p99 in p99s)} s", file=sys.stderr, flush=True
    )
    return 2 * sum(p99 < TTFT_GOAL_S for p99 in p99s) > len(p99s)
