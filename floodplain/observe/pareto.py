"""Plots TTFT against TPOT: one point per run, whose area shows its E2E latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from floodplain.observe.style import COLOURS, MARKERS, Run, make_figure, styled, subtitle
from floodplain.observe.table import lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_POINT = 900.0
"""Area in points squared of the run with the longest E2E."""

LEGEND_SCALE = 0.3
"""Width of a point in the legend, relative to the plot."""

AXES: tuple[tuple[str, str, float], ...] = (
    ("ttft", "TTFT p99 (s)", 1e-3),
    ("tpot", "TPOT p99 (ms)", 1.0),
)
"""(goal, label, factor from milliseconds): the horizontal axis, then the vertical one."""


def draw_pareto(runs: Sequence[Run]) -> Figure | None:
    """Draw TTFT p99 against TPOT p99 with the goals as lines; None for fewer than two runs that have both."""
    points = [
        (i, name, [lookup(result, f"p99_{goal}_ms") for goal, _, _ in AXES], lookup(result, "p99_e2el_ms"))
        for i, (name, result) in enumerate(runs)
    ]
    known = [(i, name, values, e2e_ms) for i, name, values, e2e_ms in points if all(values) and e2e_ms]
    if len(known) < 2:
        return None
    longest_ms = max(e2e_ms for *_, e2e_ms in known)
    with styled():
        figure, (panel,) = make_figure("First tokens and pace: lower left is better", subtitle(runs), panel_inches=2.6)
        for i, name, values, e2e_ms in known:
            x, y = (value * factor for value, (_, _, factor) in zip(values, AXES, strict=True))
            panel.scatter(
                [x], [y], s=LARGEST_POINT * e2e_ms / longest_ms, color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)], alpha=0.7, label=f"{name} (E2E p99 {e2e_ms / 1e3:.1f} s)",
            )  # fmt: skip
        _draw_goals(panel, runs)
        _scale(panel)
        figure.legend(loc="outside lower center", ncols=min(4, len(known)), markerscale=LEGEND_SCALE)
    return figure


def _draw_goals(panel: Axes, runs: Sequence[Run]) -> None:
    """A line for each goal, if all runs have the same."""
    goals = [lookup(result, "floodplain.goals_ms") or {} for _, result in runs]
    if any(other != goals[0] for other in goals):
        return
    for (goal, _, factor), draw in zip(AXES, (panel.axvline, panel.axhline), strict=True):
        if goal in goals[0]:
            draw(goals[0][goal] * factor, color="#888888", linestyle="--", linewidth=1.0)


def _scale(panel: Axes) -> None:
    """Use logarithmic axes, with room for the points."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.margins(x=0.2, y=0.25)
    panel.set_xlabel(AXES[0][1])
    panel.set_ylabel(AXES[1][1])
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
