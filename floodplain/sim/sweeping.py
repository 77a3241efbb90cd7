"""Simulates several scenarios, one process for each core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario


def predict_all(scenarios: Sequence[Scenario], *, shows_progress: bool) -> list[dict[str, Any]]:
    """The results, in the order of ``scenarios``; with a progress bar on stderr if there are several."""
    if len(scenarios) == 1:
        return [predict(scenarios[0]).result]
    from tqdm import tqdm

    num_processes = min(len(scenarios), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        results = pool.map(_predict, scenarios)
        return list(tqdm(results, total=len(scenarios), unit="run", disable=not shows_progress))


def _predict(scenario: Scenario) -> dict[str, Any]:
    return predict(scenario).result
