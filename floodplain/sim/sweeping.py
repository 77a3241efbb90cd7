"""Simulates several scenarios, one process for each core."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.cores import count_cores
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario


@contextmanager
def worker_pool(num_tasks: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for so many tasks, at most one for each core. They end at once if the context ends with an error.

    UserError if one of them is killed.
    """
    num_processes = min(num_tasks, count_cores())
    silently = signal.signal, (signal.SIGINT, signal.SIG_DFL)  # no traceback of each when Ctrl-C reaches all
    try:
        with ProcessPoolExecutor(num_processes, get_context("spawn"), *silently) as pool:
            try:
                yield pool
            except BaseException:
                for process in list(pool._processes.values()):
                    process.terminate()
                raise
    except BrokenProcessPool:
        raise UserError("a process of the simulation was killed: is memory short? try fewer cores (taskset)") from None


def predict_all(scenarios: Sequence[Scenario], *, shows_progress: bool) -> list[dict[str, Any]]:
    """The results, in the order of ``scenarios``; with a progress bar on stderr if there are several."""
    if len(scenarios) == 1:
        return [predict(scenarios[0]).result]
    from tqdm import tqdm

    with worker_pool(len(scenarios)) as pool:
        results = pool.map(_predict, scenarios)
        return list(tqdm(results, total=len(scenarios), unit="run", disable=not shows_progress))


def _predict(scenario: Scenario) -> dict[str, Any]:
    return predict(scenario).result
