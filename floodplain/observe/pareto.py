"""TTFT p99 against TPOT p99: a point for each run, and the area in which both goals are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from floodplain.observe.style import (
    MARKERS,
    TEXT,
    Run,
    colours_of,
    draw_goal,
    make_figure,
    shared_goals_ms,
    spread,
    styled,
    subtitle,
)
from floodplain.observe.table import format_number, lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARETO_INCHES = 3.2
_BOX: Mapping[str, Any] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5}
_LABEL_SHARE = 0.13
"""Height of a point's label of two lines, relative to the panel."""


def draw_pareto(runs: Sequence[Run]) -> Figure | None:
    """Draw TTFT p99 against TPOT p99 with the goals as lines; None for fewer than two runs that have both."""
    points = [
        (name, ttft_ms / 1e3, tpot_ms, lookup(result, "median_e2el_ms"))
        for name, result in runs
        if (ttft_ms := lookup(result, "p99_ttft_ms")) and (tpot_ms := lookup(result, "p99_tpot_ms"))
    ]
    if len(points) < 2:
        return None
    goals_ms = shared_goals_ms(runs)
    with styled():
        figure, (panel,) = make_figure(_pareto_title(points, goals_ms), subtitle(runs), panel_inches=PARETO_INCHES)
        panel.set_xlim(0, 1.15 * max([x for _, x, _, _ in points] + [goals_ms.get("ttft", 0.0) / 1e3]))
        panel.set_ylim(0, 1.15 * max([y for _, _, y, _ in points] + [goals_ms.get("tpot", 0.0)]))
        _draw_goal_area(panel, goals_ms)
        _draw_points(panel, points, colours_of(name for name, _ in runs))
        shaded = "; shaded: within both goals" if {"ttft", "tpot"} <= set(goals_ms) else ""
        panel.set_xlabel(f"first token: TTFT p99 (s){shaded}")
        panel.set_ylabel("pace: TPOT p99 (ms)")
    return figure


Point = tuple[str, float, float, float | None]
"""Name, TTFT p99 in seconds, TPOT p99 in milliseconds, E2E p50 in milliseconds."""


def _pareto_title(points: Sequence[Point], goals_ms: Mapping[str, float]) -> str:
    """Which runs keep both goals at p99; without goals, which one is first in each."""
    if {"ttft", "tpot"} <= set(goals_ms):
        good = [name for name, x, y, _ in points if x * 1e3 <= goals_ms["ttft"] and y <= goals_ms["tpot"]]
        return f"p99 of TTFT and TPOT: {', '.join(good) if good else 'no run'} within both goals"
    first, fastest = min(points, key=lambda point: point[1])[0], min(points, key=lambda point: point[2])[0]
    return f"Lowest TTFT p99: {first}; lowest TPOT p99: {fastest}"


def _draw_points(panel: Axes, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    right, top = panel.get_xlim()[1], panel.get_ylim()[1]
    places = spread([y / top for _, _, y, _ in points], _LABEL_SHARE, 1.0 - _LABEL_SHARE / 2)
    for i, ((name, x, y, e2e_ms), place) in enumerate(zip(points, places, strict=True)):
        panel.scatter([x], [y], s=90, color=colours[name], marker=MARKERS[i % len(MARKERS)], label=name, zorder=3)
        is_left = x > right / 2
        words = f"{name}\nE2E p50 {format_number(None if e2e_ms is None else e2e_ms / 1e3)} s"
        panel.annotate(
            words, (x, place * top), (-9 if is_left else 9, 0), textcoords="offset points", va="center",
            ha="right" if is_left else "left", fontsize=9, color=colours[name], bbox=_BOX,
        )  # fmt: skip


def _draw_goal_area(panel: Axes, goals_ms: Mapping[str, float]) -> None:
    """A line for each goal with its value, and a shade where both are met."""
    right, top = panel.get_xlim()[1], panel.get_ylim()[1]
    words: Mapping[str, Any] = {"fontsize": 8.5, "color": TEXT}
    x_s, y_ms = goals_ms.get("ttft", 0.0) / 1e3, goals_ms.get("tpot", 0.0)
    if x_s:
        draw_goal(panel.axvline, x_s)
        panel.text(x_s + 0.01 * right, 0.985 * top, f"goal {format_number(x_s)} s", va="top", **words)
    if y_ms:
        draw_goal(panel.axhline, y_ms)
        panel.text(0.995 * right, y_ms, f"goal {format_number(y_ms)} ms", va="bottom", ha="right", **words)
    if x_s and y_ms:
        panel.fill_between([0, x_s], y_ms, color="#EAF5F0", zorder=0)
