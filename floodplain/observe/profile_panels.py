"""Panels of a profile's picture: the tries over one horizontal axis, with limits, the result, and a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from floodplain.files.profile import Profile
from floodplain.observe.style import COLOURS, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
PANEL_INCHES = 1.8
_BLUE, _RED, _GREEN, *_ = COLOURS


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel.

    Attributes:
        label: Label of its vertical axis.
        points: One point for each try.
        name: Name of the points in the legend; None: they are not in it.
        limit: A horizontal line and its name; None: there is none.
        errors: Half the length of each point's error bar; empty: no bars.
        missed: The points of tries that missed the goals.
        is_joined: Whether a line joins the medians of points with equal x.
    """

    label: str
    points: Sequence[Point]
    name: str | None = None
    limit: tuple[float, str] | None = None
    errors: Sequence[float] = ()
    missed: Sequence[Point] = ()
    is_joined: bool = True


def draw_panels(
    profile: Profile, title: str, x_label: str, curves: Sequence[Curve], panel_inches: float = PANEL_INCHES
) -> Figure | None:
    """A panel for each curve that has points, over one horizontal axis; None if there is none."""
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return None
    how = ", computed" if profile.is_virtual else ""
    figure, panels = make_figure(title, f"{profile.subject} on {profile.machine}{how}", len(shown), panel_inches)
    for panel, curve in zip(panels, shown, strict=True):
        _draw_curve(panel, curve)
    panels[-1].set_xlabel(x_label)
    figure.align_ylabels(panels)
    return figure


def _draw_curve(panel: Axes, curve: Curve) -> None:
    """Draw the points, the line through their medians, and the limit."""
    xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
    panel.scatter(xs, ys, color=_BLUE, s=14, zorder=3, label=curve.name)
    if curve.missed:
        missed = [x for x, _ in curve.missed], [y for _, y in curve.missed]
        panel.scatter(*missed, color=_RED, marker="x", s=40, zorder=4, label="missed the goals")
    if curve.is_joined:
        middles = [(x, median(y for other, y in curve.points if other == x)) for x in sorted(set(xs))]
        panel.plot([x for x, _ in middles], [y for _, y in middles], color=_BLUE, linewidth=1.2)
    if any(curve.errors):
        panel.errorbar(xs, ys, yerr=curve.errors, color=_BLUE, linestyle="none", linewidth=0.9, capsize=2)
    if curve.limit is not None:
        panel.axhline(curve.limit[0], color=_RED, linestyle="--", linewidth=1.0, label=curve.limit[1])
    panel.set_ylabel(curve.label)


def mark_result(panel: Axes, x: float, label: str) -> None:
    """Draw a vertical line at the result."""
    panel.axvline(x, color=_GREEN, linewidth=1.4, zorder=1, label=label)


def finish(figure: Figure | None) -> Figure | None:
    """Start linear axes at zero, and add one legend under the panels."""
    if figure is None:
        return None
    for panel in figure.axes:
        if panel.get_yscale() == "linear":
            panel.set_ylim(bottom=0)
    named = {
        label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=min(4, len(named)))
    return figure
