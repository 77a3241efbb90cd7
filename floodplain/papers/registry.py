"""All figures that can be simulated, by name."""

from __future__ import annotations

from types import MappingProxyType

from floodplain.core.errors import UserError
from floodplain.papers import aqua, kunserve, pie
from floodplain.papers.claims import Figure

PAPERS = {
    "aqua": "AQUA: Network-Accelerated Memory Offloading for LLMs in Scale-Up GPU Domains (ASPLOS 2025)",
    "pie": "Pie: Pooling CPU Memory for LLM Inference (arXiv 2411.09317)",
    "kunserve": "KunServe: Parameter-centric Memory Management for Overloads in LLM Serving (EuroSys 2026)",
}
"""Titles by the short names with which figures begin."""

FIGURES = MappingProxyType({figure.name: figure for figure in (*aqua.FIGURES, *pie.FIGURES, *kunserve.FIGURES)})
"""All figures by name, in the order of the page."""


def figure_named(name: str) -> Figure:
    """The figure called ``name``; UserError, with all names, if there is none."""
    figure = FIGURES.get(name.lower())
    if figure is None:
        raise UserError(f"no figure is called {name!r}; there are {', '.join(FIGURES)}")
    return figure
