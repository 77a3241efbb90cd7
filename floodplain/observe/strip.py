"""Plots when each request was on the device: one panel per run, one row per request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from floodplain.core.lifecycle import EventKind, Lifecycle, residence_s
from floodplain.observe.style import COLOURS, Run, make_figure, styled, subtitle
from floodplain.observe.table import lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 2.6
POINTS_PER_INCH = 72
BAR_SHARE = 0.8
"""Height of a bar, relative to its row."""
ALIVE_COLOUR = "#b8b8b8"
MAX_BAR_POINTS = 8.0


def residence_columns(lifecycles: Iterable[Lifecycle], start_s: float = 0.0) -> dict[str, list[Any]]:
    """Lists with an entry for each ended request in order of arrival, for a result's ``floodplain.residence``.

    Times are seconds since ``start_s``: ``arrival_s``; ``first_token_s``, None without a token; ``finished_s``;
    ``on_device_s``, pairs of start and end.
    """
    columns: dict[str, list[Any]] = {"arrival_s": [], "first_token_s": [], "finished_s": [], "on_device_s": []}
    for life in sorted(lifecycles, key=lambda life: life.arrival_s):
        finished_s = life.first(EventKind.FINISHED)
        if finished_s is None:
            raise ValueError("a request that has not ended has no row")
        columns["arrival_s"].append(life.arrival_s - start_s)
        columns["first_token_s"].append(life.token_times_s[0] - start_s if life.token_times_s else None)
        columns["finished_s"].append(finished_s - start_s)
        columns["on_device_s"].append([[begin - start_s, end - start_s] for begin, end in residence_s(life)])
    return columns


def draw_strip(runs: Sequence[Run]) -> Figure | None:
    """Draw when each request was on the device, live, and got its first token; None if no run has these data."""
    known = [
        (COLOURS[i % len(COLOURS)], name, columns)
        for i, (name, result) in enumerate(runs)
        if (columns := lookup(result, "floodplain.residence")) and columns["arrival_s"]
    ]
    if not known:
        return None
    with styled():
        figure, panels = make_figure("When each request was on the device", subtitle(runs), len(known), PANEL_INCHES)
        for panel, (colour, name, columns) in zip(panels, known, strict=True):
            _draw_rows(panel, columns, colour)
            panel.set_ylabel(f"{name}\n(request)")
        panels[-1].set_xlabel("seconds since the load began")
        panels[-1].set_xlim(left=0)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.align_ylabels(panels)
    return figure


def _draw_rows(panel: Axes, columns: Mapping[str, Sequence[Any]], colour: str) -> None:
    from matplotlib.ticker import MaxNLocator

    num_rows = len(columns["arrival_s"])
    width = min(MAX_BAR_POINTS, BAR_SHARE * PANEL_INCHES * POINTS_PER_INCH / num_rows)
    lives = [[pair] for pair in zip(columns["arrival_s"], columns["finished_s"], strict=True)]
    firsts = [(when, row) for row, when in enumerate(columns["first_token_s"], start=1) if when is not None]
    panel.plot(
        *_bars(lives), color=ALIVE_COLOUR, linewidth=min(0.6, width / 2), solid_capstyle="butt",
        label="alive, off the device",
    )  # fmt: skip
    panel.plot(
        *_bars(columns["on_device_s"]), color=colour, linewidth=width, solid_capstyle="butt", label="on the device"
    )
    panel.plot(
        *(zip(*firsts, strict=True) if firsts else ((), ())),
        color="#000000", marker="o", markersize=min(3.0, 1.2 + width / 3), linestyle="none", label="first token",
    )  # fmt: skip
    panel.set_ylim(num_rows + 1, 0)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", visible=False)


def _bars(rows: Iterable[Iterable[Sequence[float]]]) -> tuple[list[float], list[float]]:
    """One line with a gap after every bar, so that a picture with thousands of bars stays small."""
    xs: list[float] = []
    ys: list[float] = []
    for row, pairs in enumerate(rows, start=1):
        for begin, end in pairs:
            xs += [begin, end, math.nan]
            ys += [row, row, math.nan]
    return xs, ys
