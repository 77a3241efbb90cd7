"""Plots of benchmark results: TTFT, TPOT, one against the other, queue and KV use over time; several runs in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.observe.strips import draw_strip
from floodplain.observe.style import (
    LINES,
    MARKERS,
    TEXT,
    Key,
    Run,
    colours_of,
    draw_goal,
    finding,
    label_ends,
    make_figure,
    render,
    save_figure,
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


Values = Callable[[Mapping[str, Any]], list[float | None]]


@dataclass(frozen=True, slots=True)
class PerRequest:
    """A value of each request: the label with its unit, its goal's name, the unit in milliseconds, and the value."""

    label: str
    goal: str
    unit_ms: float
    values: Values


def _ttfts_s(result: Mapping[str, Any]) -> list[float | None]:
    return [None if error else ttft for ttft, error in zip(result["ttfts"], result["errors"], strict=True)]


def _tpots_ms(result: Mapping[str, Any]) -> list[float | None]:
    return [
        None if error or not gaps else 1e3 * sum(gaps) / len(gaps)
        for gaps, error in zip(result["itls"], result["errors"], strict=True)
    ]


def _e2es_s(result: Mapping[str, Any]) -> list[float | None]:
    return [
        None if ttft is None else ttft + sum(gaps) for ttft, gaps in zip(_ttfts_s(result), result["itls"], strict=True)
    ]


TTFT = PerRequest("first token\nTTFT (s)", "ttft", 1e3, _ttfts_s)
TPOT = PerRequest("pace\nTPOT (ms)", "tpot", 1.0, _tpots_ms)
E2E = PerRequest("whole answer\nE2E (s)", "e2el", 1e3, _e2es_s)
REQUEST_INCHES = 1.8


def draw_ttft(runs: Sequence[Run]) -> Figure:
    """Draw each request's TTFT, and its E2E below: the gain beside its price."""
    title = "\n".join(
        (finding("TTFT p99", "p99_ttft_ms", 1e-3, "s", runs), finding("E2E p50", "median_e2el_ms", 1e-3, "s", runs))
    )
    return _by_request(title, (TTFT, E2E), runs)


def draw_tpot(runs: Sequence[Run]) -> Figure:
    """Draw each request's mean time per further token."""
    return _by_request(finding("TPOT p50", "median_tpot_ms", 1.0, "ms", runs), (TPOT,), runs)


def _by_request(title: str, values: Sequence[PerRequest], runs: Sequence[Run]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    with styled():
        figure, panels = make_figure(title, subtitle(runs), len(values), REQUEST_INCHES)
        for panel, value in zip(panels, values, strict=True):
            _draw_requests(panel, value, runs)
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1].set_xlabel("request, in order of sending")
        figure.align_ylabels(panels)
    return figure


def _draw_requests(panel: Axes, value: PerRequest, runs: Sequence[Run]) -> None:
    """Draw one value of all requests, a line for each run, with its name at the line's end."""
    ends: list[tuple[float, str, str]] = []
    colours = colours_of(name for name, _ in runs)
    for i, (name, result) in enumerate(runs):
        starts, values = result["start_times"], value.values(result)
        order = sorted(range(len(starts)), key=starts.__getitem__)
        drawn = [(rank, values[request]) for rank, request in enumerate(order, start=1) if values[request] is not None]
        panel.plot(
            *(zip(*drawn, strict=True) if drawn else ((), ())),
            color=colours[name], marker=MARKERS[i % len(MARKERS)], markersize=3.5 if len(drawn) <= 300 else 1.8,
            linewidth=0.8, label=name,
        )  # fmt: skip
        failed = [rank for rank, request in enumerate(order, start=1) if result["errors"][request]]
        words = f"{name}: failed ({len(failed)})"
        if failed:
            panel.plot(
                failed, [0.0] * len(failed), color=colours[name], marker="x", linestyle="none", clip_on=False,
                label=words,
            )  # fmt: skip
        last = (drawn[-1][1] if drawn else None) or 0.0
        ends.append((last, f"{name} (x: {len(failed)} failed)" if failed else name, colours[name]))
    panel.set_ylim(bottom=0)
    panel.set_ylabel(value.label)
    goal_ms = shared_goals_ms(runs).get(value.goal)
    if goal_ms is not None:
        draw_goal(panel.axhline, goal_ms / value.unit_ms)
        ends.append((goal_ms / value.unit_ms, "goal", TEXT))
    label_ends(panel, ends if len(runs) > 1 else ends[1:], REQUEST_INCHES)


TIMELINE_PANELS: tuple[tuple[str, str], ...] = (
    ("num_running", "running\n(requests)"),
    ("num_waiting", "waiting\n(requests)"),
    ("num_swapped", "swapped\n(requests)"),
    ("kv_use", "KV in use\n(% of pool)"),
)
"""Columns and labels. The columns of a client, which has no pool, have the same names."""


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
    colours = colours_of(columns)
    marks: Key = {
        name: {"color": colours[name], "linestyle": LINES[i % len(LINES)], "linewidth": 1.5}
        for i, name in enumerate(columns)
    }
    with styled():
        figure, axes = make_figure(
            _timeline_title(columns), subtitle(runs), len(panels), key=marks if len(runs) > 1 else None
        )
        for panel, (key, label) in zip(axes, panels, strict=True):
            for name, each in columns.items():
                if key in each:
                    panel.plot(each["time_s"], each[key], drawstyle="steps-post", label=name, **marks[name])
            panel.set_ylabel(label)
            panel.set_ylim(0, 105) if key == "kv_use" else panel.set_ylim(bottom=0)
        axes[-1].set_xlabel("seconds since the load began")
        figure.align_ylabels(axes)
    return figure


def _timeline_title(columns: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    peaks = [f"{name} {format_number(max(off_device(each), default=0))}" for name, each in columns.items() if each]
    return f"Most requests off the device at once: {', '.join(peaks)}"


def off_device(columns: Mapping[str, Sequence[float]]) -> list[float]:
    """Requests off the device over time, from the columns of a timeline."""
    waiting = columns.get("num_waiting", [])
    return [sum(pair) for pair in zip(waiting, columns.get("num_swapped") or [0] * len(waiting), strict=True)]


def _timeline(result: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    columns = dict(lookup(result, "floodplain.timeline") or {})
    used, total = columns.get("kv_used_blocks", []), columns.get("kv_total_blocks", [])
    if any(total):
        columns["kv_use"] = [100.0 * u / t if t else 0.0 for u, t in zip(used, total, strict=True)]
    return columns


def draw_all(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return every picture that the runs give, by name: ``ttft``, ``tpot``, ``pareto``, ``timeline``, ``strip``."""
    runs = [(name.replace("$", r"\$"), result) for name, result in runs]  # else matplotlib reads formulas
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
