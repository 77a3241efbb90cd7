"""AQUA's figures (ASPLOS 2025), in the order of the paper."""

from __future__ import annotations

from floodplain.papers import aqua_bursts, aqua_prefix, aqua_producers, aqua_streams

FIGURES = (
    aqua_bursts.FIGURE_1,
    aqua_bursts.FIGURE_8,
    aqua_prefix.FIGURE_9A,
    aqua_streams.FIGURE_9B,
    aqua_producers.FIGURE_10,
    aqua_producers.FIGURE_11,
    aqua_streams.FIGURE_12,
    aqua_bursts.FIGURE_13,
)
