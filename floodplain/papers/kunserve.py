"""KunServe's figures (EuroSys 2026), in the order of the paper."""

from __future__ import annotations

from floodplain.papers import kunserve_ablation, kunserve_cost, kunserve_limits, kunserve_overload

FIGURES = (
    kunserve_overload.FIGURE_2,
    kunserve_limits.FIGURE_5,
    kunserve_overload.FIGURE_12,
    kunserve_overload.FIGURE_13,
    kunserve_ablation.FIGURE_14,
    kunserve_cost.FIGURE_15,
    kunserve_ablation.FIGURE_16,
    kunserve_limits.FIGURE_17,
)
