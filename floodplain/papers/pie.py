"""Pie's figures (2024), in the order of the paper."""

from __future__ import annotations

from floodplain.papers import pie_adaptive, pie_flexgen, pie_throughput

FIGURES = (
    pie_throughput.FIGURE_6,
    pie_throughput.FIGURE_7,
    pie_throughput.FIGURE_8,
    pie_adaptive.FIGURE_9,
    pie_flexgen.FIGURE_10,
)
