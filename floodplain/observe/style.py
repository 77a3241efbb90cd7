"""The look of all pictures. Matplotlib is imported when one is drawn; it opens no windows and keeps no state."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from floodplain.files.results import write_result
from floodplain.observe.table import format_number, lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = tuple[str, Mapping[str, Any]]
"""A name and a benchmark result."""
Key = Mapping[str, Mapping[str, Any]]
"""Labels of a picture's key, each with the properties of its line or marker."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which people with any colour vision can tell apart (https://jfly.uni-koeln.de/color/)."""
BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
GREY, PALE, TEXT = "#6E6E6E", "#DDDDDD", "#555555"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")

POLICY_COLOURS: Mapping[str, str] = {
    "floodplain": GREEN,
    "timely": GREEN,
    "aqua": VERMILLION,
    "kunserve": BLUE,
    "pie": SKY,
    "cfs": ORANGE,
    "paced": SKY,
    "fair": PINK,
    "fcfs": GREY,
    "vllm": GREY,
    "stock": GREY,
}
"""Colours of policies and systems by a word of their name, in every picture; the first word that is found counts."""
_FREE = (BLUE, PINK, SKY, ORANGE, VERMILLION, BLACK, GREEN)

STYLE: Mapping[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.01,
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "floodplain",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the common style while the context is open."""
    import matplotlib

    with matplotlib.rc_context(dict(STYLE)):
        yield


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: that of its policy or system, or a free one if it has none or that is taken."""
    names = list(dict.fromkeys(names))
    chosen: dict[str, str] = {}
    for name in names:
        colour = _fixed_colour(name)
        if colour is not None and colour not in chosen.values():
            chosen[name] = colour
    free = cycle([colour for colour in _FREE if colour not in chosen.values()] or COLOURS)
    return {name: chosen[name] if name in chosen else next(free) for name in names}


def _fixed_colour(name: str) -> str | None:
    words = set(re.findall("[a-z]+", name.lower()))
    return next((colour for word, colour in POLICY_COLOURS.items() if word in words), None)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the name's suffix. Raises WriteFailed."""
    write_result(path, small_png(figure) if path.suffix == ".png" else render(figure, path.suffix[1:]))


def render(figure: Figure, kind: str) -> bytes:
    """A figure as ``png``, ``svg`` or ``pdf``, the same for the same data; text of an ``svg`` stays text."""
    unnamed = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, metadata=unnamed.get(kind))
    return buffer.getvalue()


NUM_PNG_COLOURS = 64


def small_png(figure: Figure) -> bytes:
    """A figure as PNG with few colours, a third of the bytes. Pillow comes with matplotlib."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(render(figure, "png"))) as image:
        image.convert("RGB").quantize(NUM_PNG_COLOURS).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


WIDTH, EDGE, AXIS_INCHES = 8.0, 0.12, 0.55
"""Inches: the width of a figure, its margin, and the height of its horizontal axis with a label."""
_TITLE, _WHERE, _KEY = 12.5, 8.5, 9.5
_LINE_HEIGHT, _POINTS = 1.35, 72
_CHAR_WIDTH = {_TITLE: 0.61, _WHERE: 0.57, _KEY: 0.56}
"""Mean width of a character, relative to the font size; titles are bold."""
_SYMBOL_CHARS = 6
"""Width of a symbol of the key and of the gap beside it, in characters."""


def make_figure(
    title: str,
    where: str,
    num_panels: int = 1,
    panel_inches: float = 1.6,
    *,
    key: Key | None = None,
    width: float = WIDTH,
    heights: Sequence[float] = (),
    shares_x: bool = True,
    right: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """A figure with stacked panels under a title, a subtitle ``where`` and a key. Long text is wrapped.

    ``heights`` are those of the panels, relative to ``panel_inches``; by default all are 1. The panels have one
    horizontal axis unless ``shares_x`` is False. A share ``right`` of the width stays free beside them.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    key, ratios = key or {}, list(heights) or [1.0] * num_panels
    titles, subtitles = _wrapped(title, _TITLE, width), _wrapped(where, _WHERE, width)
    num_columns, num_rows = _key_shape(key, width)
    parts = [_inches(_TITLE, len(titles)), _inches(_WHERE, len(subtitles)), _inches(_KEY, num_rows)]
    head = 2 * EDGE + sum(parts)
    height = head + panel_inches * sum(ratios) + AXIS_INCHES * (1 if shares_x else num_panels)
    layout = ConstrainedLayoutEngine(rect=(0.0, 0.0, 1.0 - right, 1.0 - head / height))
    figure = Figure(figsize=(width, height), layout=layout)
    panels = list(figure.subplots(num_panels, 1, sharex=shares_x, squeeze=False, height_ratios=ratios)[:, 0])
    left, tops = EDGE / width, [1.0 - (EDGE + sum(parts[:i])) / height for i in range(len(parts))]
    figure.text(left, tops[0], "\n".join(titles), va="top", fontsize=_TITLE, fontweight="bold")
    figure.text(left, tops[1], "\n".join(subtitles), va="top", fontsize=_WHERE, color=TEXT)
    if key:
        _add_key(figure, key, (left, tops[2]), num_columns)
    return figure, panels


def _wrapped(text: str, size: float, width: float) -> list[str]:
    """The lines of a text that fit into the figure; line breaks stay."""
    return [line for part in text.splitlines() for line in wrap(part, _num_chars(size, width))]


def _num_chars(size: float, width: float) -> int:
    return int((width - 2 * EDGE) * _POINTS / (size * _CHAR_WIDTH[size]))


def _inches(size: float, num_lines: int) -> float:
    return num_lines * size * _LINE_HEIGHT / _POINTS


def _key_shape(key: Key, width: float) -> tuple[int, int]:
    """Columns and rows of the key: as many columns as fit, filled one after another."""
    lengths, num_chars = [len(label) + _SYMBOL_CHARS for label in key], _num_chars(_KEY, width)
    for num_columns in range(len(key), 0, -1):
        num_rows, num_longer = -(-len(key) // num_columns), len(key) % num_columns or num_columns
        begins = [num_rows * i - max(0, i - num_longer) for i in range(num_columns + 1)]
        if num_columns == 1 or sum(max(lengths[i:j]) for i, j in pairwise(begins)) <= num_chars:
            return num_columns, num_rows
    return 0, 0


def _add_key(figure: Figure, key: Key, place: tuple[float, float], num_columns: int) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        [Line2D([], [], **mark) for mark in key.values()], list(key), loc="upper left", bbox_to_anchor=place,
        ncols=num_columns, fontsize=_KEY, borderpad=0, borderaxespad=0, labelspacing=0.25, columnspacing=1.4,
        handlelength=1.6, handletextpad=0.5,
    )  # fmt: skip


def area(colour: str) -> Mapping[str, Any]:
    """The mark of an area in a key."""
    return {"color": colour, "marker": "s", "linestyle": "none", "markersize": 8}


def label_ends(panel: Axes, ends: Sequence[tuple[float, str, str]], panel_inches: float) -> None:
    """Write (value, text, colour) at the right edge of a panel whose limits are set; texts do not overlap."""
    low, high = panel.get_ylim()
    places = spread([(value - low) / (high - low) for value, _, _ in ends], _inches(_KEY, 1) / panel_inches)
    for place, (_, text, colour) in zip(places, ends, strict=True):
        panel.text(1.01, place, text, transform=panel.transAxes, color=colour, va="center", fontsize=_KEY)


def spread(places: Sequence[float], gap: float, limit: float = 1.0) -> list[float]:
    """Places from 0 to ``limit``, moved as needed so that they are ``gap`` apart; their order stays."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + gap)
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def use_log_axes(panel: Axes) -> None:
    """Make both axes logarithmic, with labels at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def subtitle(runs: Sequence[Run]) -> str:
    """Return model and hardware of the runs, each once; with an emulated link if any run has one."""
    models = dict.fromkeys(str(result.get("model_id") or "unknown model") for _, result in runs)
    hardware = dict.fromkeys(
        str(lookup(result, "floodplain.hardware.name") or "hardware unknown (measured at the client)")
        for _, result in runs
    )
    named = [name for name in hardware if not any(other.endswith(f" on {name}") for other in hardware)]
    return f"{', '.join(models)} on {', '.join(named)}"


MOST_NAMED = 3


def finding(
    what: str,
    key: str,
    factor: float,
    unit: str,
    runs: Sequence[Run],
    form: Callable[[float], str] = format_number,
) -> str:
    """A title: ``what``, and the runs' values of ``key`` times ``factor``; of many runs the lowest and the highest."""
    known = [(value * factor, name) for name, result in runs if (value := lookup(result, key)) is not None]
    if len(known) > MOST_NAMED:
        known = [min(known), max(known)]
    values = [f"{name} {form(value)}\N{NO-BREAK SPACE}{unit}" for value, name in known]  # not at the end of a line
    return f"{what}: {', '.join(values)}" if values else what


def shared_goals_ms(runs: Sequence[Run]) -> Mapping[str, float]:
    """The goals of the runs in milliseconds, by name; empty if the runs have different ones."""
    goals: list[Mapping[str, float]] = [lookup(result, "floodplain.goals_ms") or {} for _, result in runs]
    return goals[0] if goals and all(other == goals[0] for other in goals) else {}


def draw_goal(draw: Callable[..., object], value: float) -> None:
    """Draw a goal with ``axhline`` or ``axvline`` of a panel."""
    draw(value, color=GREY, linestyle="--", linewidth=1.0, label="goal")
