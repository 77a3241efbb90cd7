"""Simulates figures, one process for each core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from floodplain.papers.claims import Figure, Finding, Measured
from floodplain.papers.registry import figure_named


def run_figures(figures: Sequence[Figure], seeds: Sequence[int], *, shows_progress: bool) -> list[Finding]:
    """What comes out of each figure, in order; with a progress bar on stderr."""
    from tqdm import tqdm

    runs = [(figure, *run) for figure in figures for run in figure.list_runs(seeds)]
    num_processes = min(len(runs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        futures: list[Future[Measured]] = [pool.submit(_run, figure.name, label, seed) for figure, label, seed in runs]
        try:
            for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=not shows_progress):
                future.result()  # the first error ends the others
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    done = {
        (figure.name, label, seed): future.result() for (figure, label, seed), future in zip(runs, futures, strict=True)
    }
    return [figure.judge({run: done[figure.name, *run] for run in figure.list_runs(seeds)}) for figure in figures]


def _run(name: str, label: str, seed: int) -> Measured:
    return figure_named(name).run_once(label, seed)
