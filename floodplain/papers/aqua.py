"""AQUA's figures (ASPLOS 2025), in the order of the paper."""

from __future__ import annotations

from floodplain.papers import aqua_bursts

FIGURES = (aqua_bursts.FIGURE_1, aqua_bursts.FIGURE_8, aqua_bursts.FIGURE_13)
