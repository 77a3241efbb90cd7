"""Plots of benchmark results: TTFT, TPOT, one against the other, queue and KV use over time; several runs in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.core.lifecycle import EventKind, Lifecycle, residence_s
from floodplain.observe.style import (
    COLOURS,
    LINES,
    MARKERS,
    Run,
    add_legend,
    make_figure,
    render,
    save_figure,
    styled,
    subtitle,
    use_log_axes,
)
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
        use_log_axes(panel)
        panel.margins(x=0.2, y=0.25)
        panel.set_xlabel(AXES[0][1])
        panel.set_ylabel(AXES[1][1])
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


TIMELINE_PANELS: tuple[tuple[str, str], ...] = (
    ("num_running", "running\n(requests)"),
    ("num_waiting", "waiting\n(requests)"),
    ("num_swapped", "swapped\n(requests)"),
    ("kv_use", "KV in use\n(% of pool)"),
)


def _by_request(
    title: str, unit: str, runs: Sequence[Run], values: Callable[[Mapping[str, Any]], list[float | None]]
) -> Figure:
    """Draw one value per request, in the order in which the requests were sent."""
    from matplotlib.ticker import MaxNLocator

    with styled():
        figure, (panel,) = make_figure(title, subtitle(runs))
        for i, (name, result) in enumerate(runs):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            starts = result["start_times"]
            order = sorted(range(len(starts)), key=starts.__getitem__)
            by_rank = [(rank, values(result)[request]) for rank, request in enumerate(order, start=1)]
            drawn = [(rank, value) for rank, value in by_rank if value is not None]
            panel.plot(
                *(zip(*drawn, strict=True) if drawn else ((), ())),
                color=colour, marker=marker, markersize=3.5 if len(drawn) <= 300 else 1.8, linewidth=0.8, label=name,
            )  # fmt: skip
            failed = [rank for rank, request in enumerate(order, start=1) if result["errors"][request]]
            if failed:
                label = f"{name}: failed ({len(failed)})"
                panel.plot(
                    failed, [0.0] * len(failed), color=colour, marker="x", linestyle="none", clip_on=False, label=label
                )
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("request, in order of sending")
        panel.set_ylabel(unit)
        add_legend(figure, panel, runs)
    return figure


def _ttfts_s(result: Mapping[str, Any]) -> list[float | None]:
    return [None if error else ttft for ttft, error in zip(result["ttfts"], result["errors"], strict=True)]


def _tpots_ms(result: Mapping[str, Any]) -> list[float | None]:
    return [
        None if error or not gaps else 1e3 * sum(gaps) / len(gaps)
        for gaps, error in zip(result["itls"], result["errors"], strict=True)
    ]


def draw_ttft(runs: Sequence[Run]) -> Figure:
    """Draw each request's TTFT."""
    return _by_request("Wait for the first token (TTFT)", "seconds", runs, _ttfts_s)


def draw_tpot(runs: Sequence[Run]) -> Figure:
    """Draw each request's mean time per further token."""
    return _by_request("Mean time per output token (TPOT)", "milliseconds", runs, _tpots_ms)


def draw_timeline(runs: Sequence[Run]) -> Figure | None:
    """Draw running and waiting requests and KV use over time; None if no run has a timeline."""
    columns = {name: _timeline(result) for name, result in runs}
    panels = [
        (key, label)
        for key, label in TIMELINE_PANELS
        if any(key in each and (key != "num_swapped" or any(each[key])) for each in columns.values())
    ]
    if not panels:
        return None
    with styled():
        figure, axes = make_figure("Requests and KV memory over time", subtitle(runs), len(panels))
        for panel, (key, label) in zip(axes, panels, strict=True):
            for i, (name, each) in enumerate(columns.items()):
                if key in each:
                    panel.plot(
                        each["time_s"], each[key], drawstyle="steps-post", linewidth=1.3,
                        color=COLOURS[i % len(COLOURS)], linestyle=LINES[i % len(LINES)], label=name,
                    )  # fmt: skip
            panel.set_ylabel(label)
            panel.set_ylim(0, 105) if key == "kv_use" else panel.set_ylim(bottom=0)
        axes[-1].set_xlabel("seconds since the load began")
        figure.align_ylabels(axes)
        add_legend(figure, axes[0], runs)
    return figure


def _timeline(result: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    columns = dict(lookup(result, "floodplain.timeline") or {})
    used, total = columns.get("kv_used_blocks", []), columns.get("kv_total_blocks", [])
    if any(total):
        columns["kv_use"] = [100.0 * u / t if t else 0.0 for u, t in zip(used, total, strict=True)]
    return columns


def draw_all(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return every picture that the runs give, by name: ``ttft``, ``tpot``, ``pareto``, ``timeline``, ``strip``."""
    drawn = {
        "ttft": draw_ttft(runs),
        "tpot": draw_tpot(runs),
        "pareto": draw_pareto(runs),
        "timeline": draw_timeline(runs),
        "strip": draw_strip(runs),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def to_svg(figure: Figure) -> str:
    """Return a figure as SVG text."""
    return render(figure, "svg").decode()


def save_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every picture of the runs into ``folder``; return the paths."""
    return save_figures(draw_all(runs), folder)


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each figure as ``NAME.svg`` and ``NAME.png`` into ``folder``; return the paths. May raise WriteFailed."""
    paths = [folder / f"{name}.{kind}" for name in figures for kind in ("svg", "png")]
    for path in paths:
        save_figure(figures[path.stem], path)
    return paths


PANEL_INCHES = 2.6
POINTS_PER_INCH = 72
BAR_SHARE = 0.8
"""Height of a bar, relative to its row."""
ALIVE_COLOUR = "#b8b8b8"
MAX_BAR_POINTS = 8.0


def residence_columns(lifecycles: Iterable[Lifecycle], start_s: float = 0.0) -> dict[str, list[Any]]:
    """Lists by ended request in order of arrival, for a result's ``floodplain.residence``; seconds since ``start_s``.

    ``on_device_s`` has pairs of start and end; ``first_token_s`` may be None.
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
