"""Simulates several scenarios, one process for each core."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.cores import count_cores
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario


class _Worker(SpawnProcess):
    """A process that never gets SIGINT. Ctrl-C reaches all processes: the parent answers it, and ends the others."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits the mask
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    Process = _Worker


@contextmanager
def worker_pool(num_tasks: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for so many tasks, at most one for each core. They end at once if the context ends with an error.

    They end with this process, too. Cancel no task: Python 3.11 prints a traceback if a process ends after that.
    UserError if one of them is killed.
    """
    num_processes = min(num_tasks, count_cores())
    try:
        with ProcessPoolExecutor(num_processes, _Context(), _watch_parent) as pool:
            try:
                yield pool
            except BaseException:
                for process in list(pool._processes.values()):
                    process.terminate()
                raise
    except BrokenProcessPool:
        raise UserError("a process of the simulation was killed: is memory short? try fewer cores (taskset)") from None


def _watch_parent() -> None:
    threading.Thread(target=_end_with_parent, name="floodplain-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def predict_all(scenarios: Sequence[Scenario], *, shows_progress: bool) -> list[dict[str, Any]]:
    """The results, in the order of ``scenarios``; with a progress bar on stderr if there are several."""
    if len(scenarios) == 1:
        return [predict(scenarios[0]).result]
    from tqdm import tqdm

    with worker_pool(len(scenarios)) as pool:
        futures = [pool.submit(_predict, scenario) for scenario in scenarios]  # ``map`` cancels them at an error
        return [future.result() for future in tqdm(futures, unit="run", disable=not shows_progress)]


def _predict(scenario: Scenario) -> dict[str, Any]:
    return predict(scenario).result
