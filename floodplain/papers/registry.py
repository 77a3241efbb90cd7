"""All figures that can be simulated, by name; simulates them, one process for each core."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from types import MappingProxyType

from floodplain.core.errors import UserError
from floodplain.papers import (
    aqua_bursts,
    aqua_prefix,
    aqua_producers,
    aqua_streams,
    kunserve_ablation,
    kunserve_cost,
    kunserve_limits,
    kunserve_overload,
    pie_adaptive,
    pie_flexgen,
    pie_throughput,
)
from floodplain.papers.claims import Figure, Finding, Measured
from floodplain.sim.sweeping import worker_pool

PAPERS = {
    "aqua": "AQUA: Network-Accelerated Memory Offloading for LLMs in Scale-Up GPU Domains (ASPLOS 2025)",
    "pie": "Pie: Pooling CPU Memory for LLM Inference (arXiv 2411.09317)",
    "kunserve": "KunServe: Parameter-centric Memory Management for Overloads in LLM Serving (EuroSys 2026)",
}
"""Titles by the short names with which figures begin."""

_IN_ORDER = (
    aqua_bursts.FIGURE_1,
    aqua_bursts.FIGURE_8,
    aqua_prefix.FIGURE_9A,
    aqua_streams.FIGURE_9B,
    aqua_producers.FIGURE_10,
    aqua_producers.FIGURE_11,
    aqua_streams.FIGURE_12,
    aqua_bursts.FIGURE_13,
    pie_throughput.FIGURE_6,
    pie_throughput.FIGURE_7,
    pie_throughput.FIGURE_8,
    pie_adaptive.FIGURE_9,
    pie_flexgen.FIGURE_10,
    kunserve_overload.FIGURE_2,
    kunserve_limits.FIGURE_5,
    kunserve_overload.FIGURE_12,
    kunserve_overload.FIGURE_13,
    kunserve_ablation.FIGURE_14,
    kunserve_cost.FIGURE_15,
    kunserve_ablation.FIGURE_16,
    kunserve_limits.FIGURE_17,
)

FIGURES = MappingProxyType({figure.name: figure for figure in _IN_ORDER})
"""All figures by name, in the order of the page."""


def figure_named(name: str) -> Figure:
    """The figure called ``name``; UserError, with all names, if there is none."""
    figure = FIGURES.get(name.lower())
    if figure is None:
        raise UserError(f"no figure is called {name!r}; there are {', '.join(FIGURES)}")
    return figure


def run_figures(figures: Sequence[Figure], seeds: Sequence[int], *, shows_progress: bool) -> list[Finding]:
    """What comes out of each figure, in order; with a progress bar on stderr."""
    from tqdm import tqdm

    runs = [(figure, *run) for figure in figures for run in figure.list_runs(seeds)]
    with worker_pool(len(runs)) as pool:
        futures: list[Future[Measured]] = [pool.submit(_run, figure.name, label, seed) for figure, label, seed in runs]
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=not shows_progress):
            future.result()  # the first error ends the others
    done = {
        (figure.name, label, seed): future.result() for (figure, label, seed), future in zip(runs, futures, strict=True)
    }
    return [figure.judge({run: done[figure.name, *run] for run in figure.list_runs(seeds)}) for figure in figures]


def _run(name: str, label: str, seed: int) -> Measured:
    return figure_named(name).run_once(label, seed)
