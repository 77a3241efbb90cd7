"""Strips: one row for each request, coloured by what it did when. Also the picture of the README."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from floodplain.observe.residence import STATES, Span, spans_by_state
from floodplain.observe.style import BLACK, SKY, TEXT, Key, Run, area, colours_of, finding, make_figure, styled
from floodplain.observe.style import subtitle as subtitle_of
from floodplain.observe.table import format_number, lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATE_COLOURS: Mapping[str, str] = dict(zip(STATES, ("#F0A43A", BLACK, SKY, "#D0D0D0"), strict=True))
STATE_LABELS: Mapping[str, str] = dict(
    zip(STATES, ("waiting for the first token", "prefill", "decoding", "preempted or swapped out"), strict=True)
)
KEY: Key = {STATE_LABELS[state]: area(colour) for state, colour in STATE_COLOURS.items()}

PANEL_INCHES = 2.3
BAR_SHARE, MAX_BAR_POINTS = 0.8, 8.0
"""Height of a bar relative to its row, and at most."""
_POINTS = 72


def draw_strip(runs: Sequence[Run]) -> Figure | None:
    """Draw what each request did when; None if no run has these data."""
    known = _with_rows(runs)
    if not known:
        return None
    colours = colours_of(name for name, _ in runs)
    title = finding("Requests that met all goals", "slo_attainment", 100.0, "%", runs, "{:.0f}".format)
    if not any(lookup(result, "slo_attainment") is not None for _, result in runs):
        title = "What each request did, one row for each"
    with styled():
        figure, panels = make_figure(title, subtitle_of(runs), len(known), PANEL_INCHES, key=KEY)
        for panel, (name, result) in zip(panels, known, strict=True):
            _draw_rows(panel, result["floodplain"], PANEL_INCHES)
            panel.set_title(name, loc="left", fontsize=10, fontweight="bold", color=colours[name])
            panel.set_ylabel("request")
        panels[-1].set_xlabel(_time_label(known))
        panels[-1].set_xlim(left=0)
        figure.align_ylabels(panels)
    return figure


def _time_label(runs: Sequence[Run]) -> str:
    has_lines = any(len(result["floodplain"].get("bursts_s", ())) > 1 for _, result in runs)
    return f"seconds since the load began{'; dotted: the next burst' if has_lines else ''}"


def _with_rows(runs: Sequence[Run]) -> list[Run]:
    known = []
    for name, result in runs:
        columns = lookup(result, "floodplain.residence")
        if columns and columns["arrival_s"]:
            known.append((name, result))
    return known


def _draw_rows(panel: Axes, facts: Mapping[str, Any], panel_inches: float) -> None:
    """Draw the requests of a result's ``floodplain``; a dotted line is the begin of another burst."""
    from matplotlib.ticker import MaxNLocator

    columns = facts["residence"]
    num_rows = len(columns["arrival_s"])
    width = min(MAX_BAR_POINTS, BAR_SHARE * panel_inches * _POINTS / (num_rows + 1))
    for state, rows in spans_by_state(columns).items():
        panel.plot(
            *_bars(rows), color=STATE_COLOURS[state], linewidth=width, solid_capstyle="butt", label=STATE_LABELS[state]
        )
    panel.set_ylim(num_rows + 1, 0)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    panel.grid(axis="y", visible=False)
    for begin_s in facts.get("bursts_s", ())[1:]:
        panel.axvline(begin_s, color=TEXT, linewidth=0.8, linestyle=":")


def _bars(rows: Iterable[Iterable[Span]]) -> tuple[list[float], list[float]]:
    """One line with a gap after every bar, so that a picture with thousands of bars stays small."""
    xs: list[float] = []
    ys: list[float] = []
    for row, spans in enumerate(rows, start=1):
        for begin, end in spans:
            xs += [begin, end, math.nan]
            ys += [row, row, math.nan]
    return xs, ys


README_NAMES = ("First come, first served", "Floodplain")
README_WIDTH, README_PANEL = 9.0, 1.75
"""Inches; at 900 pixels an inch has a hundred."""
_FIGURE_SHARE = 0.24
"""Width beside the strips for the large figures, relative to the picture."""
_LARGE, _SMALL = 40, 11
"""Font sizes of the large figures and of the text under them."""


def draw_beside_stock(stock: Run, ours: Run) -> Figure | None:
    """Draw two strips, each beside the share of requests that met all goals; None without rows or goals."""
    runs = [stock, ours]
    if len(_with_rows(runs)) < len(runs) or any(result["slo_attainment"] is None for _, result in runs):
        return None
    colours = colours_of(name for name, _ in runs)
    waits = [format_number((result["p99_ttft_ms"] or math.nan) / 1e3) for _, result in runs]
    title = f"TTFT p99: {waits[0]} s first come, first served, {waits[1]} s with Floodplain"
    longest_s = max(max(result["floodplain"]["residence"]["finished_s"]) for _, result in runs)
    with styled():
        figure, panels = make_figure(
            title, subtitle_of(runs), 2, README_PANEL, key=KEY, width=README_WIDTH, right=_FIGURE_SHARE
        )  # fmt: skip
        for panel, (name, result), words in zip(panels, runs, README_NAMES, strict=True):
            _draw_rows(panel, result["floodplain"], README_PANEL)
            panel.set_title(words, loc="left", fontsize=12, fontweight="bold", color=colours[name])
            panel.set_ylabel("request")
            _write_share(panel, result, colours[name])
        panels[-1].set_xlim(0, longest_s)
        panels[-1].set_xlabel(_time_label(runs))
    return figure


def _write_share(panel: Axes, result: Mapping[str, Any], colour: str) -> None:
    middle = 1.0 + 0.5 * _FIGURE_SHARE / (1.0 - _FIGURE_SHARE)
    share = f"{100 * result['slo_attainment']:.0f} %"
    style: Mapping[str, Any] = {"transform": panel.transAxes, "ha": "center", "in_layout": False}
    panel.text(middle, 0.68, share, va="center", fontsize=_LARGE, fontweight="bold", color=colour, **style)
    words = f"of {result['num_prompts']} requests\nmet both goals"
    panel.text(middle, 0.22, words, va="center", fontsize=_SMALL, color=TEXT, **style)
