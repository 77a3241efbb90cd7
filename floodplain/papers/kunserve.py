"""KunServe's figures (EuroSys 2026), in the order of the paper."""

from __future__ import annotations

from floodplain.papers import kunserve_cost

FIGURES = (kunserve_cost.FIGURE_15,)
