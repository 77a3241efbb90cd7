"""A profile as text and, in the form of AQUA's Figures 3, 4 and 7, as a picture. Data that it lacks is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from floodplain.files.profile import Profile
from floodplain.observe.style import COLOURS, make_figure, styled, use_log_axes
from floodplain.observe.table import format_table
from floodplain.observe.terminal import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
"""Units of sizes; a size is written in the largest that it reaches."""


def save_and_show(profile: Profile, out: Path | None, output_format: str) -> None:
    """Write the profile to ``out`` if given, and print it even if that raises WriteFailed."""
    from floodplain.observe.strict_json import save_result, to_json  # imports numpy

    document = profile.to_json()
    try:
        if out is not None:
            save_result(out, document)
    finally:
        say(to_json(document) if output_format == "json" else describe_profile(profile))


def describe_profile(profile: Profile) -> str:
    """A profile as text: subject, machine and time; the result; the tries."""
    how = "computed from a step line for" if profile.is_virtual else "measured on"
    head = f"{profile.kind} profile of {profile.subject}, {how} {profile.machine}, {profile.made_at}"
    found = _flat({**profile.result, **profile.errors})
    facts = format_table(["result", ""], [[key, format_fact(key, value)] for key, value in found])
    return "\n\n".join([head, facts, *([_tries(profile)] if profile.tries else [])])


def format_fact(key: str, value: Any) -> str:
    """A value for people: sizes (by the key's suffix) with units, numbers with four digits."""
    if key.endswith("_bytes") and isinstance(value, int):
        size, unit = next((each for each in SIZE_UNITS if abs(value) >= each[0]), SIZE_UNITS[-1])
        return f"{value / size:.4g} {unit}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _flat(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of all values; keys of a nested mapping are joined by dots."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield key, value


def _tries(profile: Profile) -> str:
    columns = list(dict.fromkeys(key for row in profile.tries for key in row if not isinstance(row[key], Mapping)))
    rows = [[format_fact(key, row.get(key)) for key in columns] for row in profile.tries]
    return format_table(columns, rows)


Point = tuple[float, float]
PANEL_INCHES = 1.8
_BLUE, _RED, _GREEN, _, _ORANGE = COLOURS[:5]


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel.

    Attributes:
        name: Name of the points in the legend; None: they are not in it.
        limit: A horizontal line and its name.
        errors: Half the length of each point's error bar.
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


PAPER_MODEL, PAPER_SWAP_GB = "yi-34b", {2.0: 6.0, 3.0: 15.0, 5.0: 40.0}
"""Swap space by burst factor: AQUA, section 9.4, Yi-34B on arXiv with one A100."""
_GREY = "#888888"


def draw_profile(profile: Profile) -> Figure | None:
    """Draw the tries and the result; None if no try has numbers for this kind of picture."""
    with styled():
        return _KINDS[profile.kind](profile)


def _draw_media(profile: Profile) -> Figure | None:
    rows = [row for row in profile.tries if _has(row, "batch", "throughput")]
    known = [row for row in rows if _has(row, "free_bytes")]
    unit, name = _unit([row["free_bytes"] for row in known])
    threshold = profile.result.get("threshold_bytes")
    curves = [
        Curve(
            "throughput\n(items/s)",
            _points(rows, "batch", "throughput"),
            errors=[row["throughput"] * (row.get("spread") or 0.0) / 2 for row in _by(rows, "batch")],
        ),
        Curve(
            f"free memory\n({name})",
            _points(known, "batch", "free_bytes", 1 / unit),
            limit=None if threshold is None else (threshold / unit, "threshold of a producer"),
        ),
    ]
    figure = draw_panels(profile, "Throughput and free memory by batch", "batch", curves)
    for panel in [] if figure is None else figure.axes:
        mark_result(panel, profile.result["batch"], "knee")
        if (limit := profile.result.get("limit_batch")) is not None:
            panel.axvspan(limit, 2 * limit, color="#f0f0f0", zorder=-1, label="out of memory")
        _scale_batches(panel, [int(row["batch"]) for row in rows], limit)
    return finish(figure)


def _draw_llm(profile: Profile) -> Figure | None:
    rows = [row for row in profile.tries if _has(row, "rate_rps")]
    pool, settings = profile.result.get("kv_bytes"), profile.settings
    free = (
        []
        if pool is None
        else [(row["rate_rps"], pool - row["peak_kv_bytes"]) for row in rows if _has(row, "peak_kv_bytes")]
    )
    unit, name = _unit([value for _, value in free])
    threshold = profile.result.get("threshold_bytes")
    curves = [
        _latency("TTFT p99\n(s)", rows, "ttft_p99_s", 1.0, _goal(settings, "ttft", 1e-3)),
        _latency("ITL p99\n(ms)", rows, "itl_p99_s", 1e3, _goal(settings, "itl", 1.0)),
        Curve(
            f"free KV\n({name})",
            [(rate, value / unit) for rate, value in free],
            limit=None if threshold is None else (threshold / unit, "threshold of a producer"),
        ),
    ]
    figure = draw_panels(profile, "Latency and free KV memory by request rate", "requests per second", curves)
    for panel in figure.axes if figure is not None and profile.result["rate_rps"] else []:
        mark_result(panel, profile.result["rate_rps"], "highest rate within the goals")
    return finish(figure)


def _latency(
    label: str, rows: Sequence[Mapping[str, Any]], key: str, factor: float, limit: tuple[float, str] | None
) -> Curve:
    missed = [row for row in rows if row.get("verdict") == "missed"]
    points = [_points(part, "rate_rps", key, factor) for part in (rows, missed)]
    return Curve(label, points[0], limit=limit, missed=points[1])


def _draw_swap(profile: Profile) -> Figure | None:
    points = [
        (float(row["factor"]), float(row["needs_bytes"])) for row in profile.tries if _has(row, "factor", "needs_bytes")
    ]
    is_papers = PAPER_MODEL in profile.subject.lower()
    unit, name = _unit([value for _, value in points] + [1e9 * value for value in PAPER_SWAP_GB.values() if is_papers])
    curve = Curve(f"swap space\n({name})", sorted((factor, value / unit) for factor, value in points), "this profile")
    figure = draw_panels(profile, "Swap space that bursts need", "burst, times the stable rate", [curve])
    if figure is not None:
        figure.axes[0].margins(x=0.05, y=0.1)
    if figure is not None and is_papers:
        factors, sizes = zip(*PAPER_SWAP_GB.items(), strict=True)
        figure.axes[0].plot(
            factors, [1e9 * size / unit for size in sizes], color=_ORANGE, marker="s", linestyle="--",
            label="AQUA, section 9.4 (Yi-34B, arXiv)",
        )  # fmt: skip
    return finish(figure)


def _draw_step(profile: Profile) -> Figure | None:
    rows = [row for row in profile.tries if _has(row, "step_s", "fitted_s")]
    points = [(1e3 * row["step_s"], 1e3 * row["fitted_s"]) for row in rows]
    figure = draw_panels(
        profile, "Steps, measured and fitted", "measured (ms)", [Curve("fitted\n(ms)", points, is_joined=False)], 3.4
    )
    if figure is None:
        return None
    (panel,) = figure.axes
    low, high = (edge(value for point in points for value in point) for edge in (min, max))
    panel.plot([low, high], [low, high], color=_GREY, linestyle="--", linewidth=1.0, label="equal")
    if low > 0:
        use_log_axes(panel)
        panel.margins(0.05)
    return finish(figure)


_KINDS: Mapping[str, Callable[[Profile], Figure | None]] = {
    "llm": _draw_llm, "media": _draw_media, "swap": _draw_swap, "step": _draw_step,
}  # fmt: skip


def _scale_batches(panel: Axes, batches: Sequence[int], limit: int | None) -> None:
    from matplotlib.ticker import NullFormatter

    largest = max([*batches, *([] if limit is None else [limit])])
    doublings = [2**k for k in range(largest.bit_length() + 1) if 2**k <= largest]
    panel.set_xscale("log", base=2)
    panel.set_xticks(doublings, [str(each) for each in doublings])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlim(0.93, largest * (1.08 if limit is None else 1.3))


def _goal(settings: Mapping[str, Any], name: str, factor: float) -> tuple[float, str] | None:
    """A goal in ms as a limit. With ``--goodput``, only its goals count."""
    goals = dict(each.split(":", 1) for each in settings.get("goodput") or ())
    value = goals.get(name) if goals else settings.get(f"{name}_ms")
    return None if value is None else (factor * float(value), "goal")


def _has(row: Mapping[str, Any], *keys: str) -> bool:
    return all(isinstance(row.get(key), int | float) for key in keys)


def _by(rows: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: float(row[key]))


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str, factor: float = 1.0) -> list[Point]:
    return [(float(row[x]), factor * row[y]) for row in _by(rows, x) if _has(row, y)]


def _unit(values: Sequence[float]) -> tuple[float, str]:
    """The largest unit of which the largest value is at least one half."""
    largest = max(values, default=0.0)
    return next((unit for unit in SIZE_UNITS if largest >= unit[0] / 2), SIZE_UNITS[-1])
