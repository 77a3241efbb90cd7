"""Pictures of benchmark results: TTFT, TPOT, and queue and KV use over time, several runs in one picture.

Matplotlib is imported when a picture is drawn, and only its figures are used: no windows, no global state kept.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.observe.table import lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = tuple[str, Mapping[str, Any]]
"""A name and a benchmark result."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which people with any colour vision can tell apart (https://jfly.uni-koeln.de/color/)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")

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

TIMELINE_PANELS: tuple[tuple[str, str], ...] = (
    ("num_running", "running\n(requests)"),
    ("num_waiting", "waiting\n(requests)"),
    ("num_swapped", "swapped\n(requests)"),
    ("kv_use", "KV in use\n(% of pool)"),
)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(dict(STYLE)):
        yield


def _figure(title: str, runs: Sequence[Run], num_panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels under each other, a title that says what, and a line that says where."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.2 + 1.6 * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    panels[0].text(
        0.0, 1.03, subtitle(runs), transform=panels[0].transAxes, ha="left", va="bottom", fontsize=8.5, color="#555555"
    )
    return figure, list(panels)


def subtitle(runs: Sequence[Run]) -> str:
    """Return model and hardware of the runs, each named once."""
    models = dict.fromkeys(str(result.get("model_id") or "unknown model") for _, result in runs)
    hardware = dict.fromkeys(
        str(lookup(result, "floodplain.hardware.name") or "hardware unknown (measured at the client)")
        for _, result in runs
    )
    return f"{', '.join(models)} on {', '.join(hardware)}"


def _legend(figure: Figure, panel: Axes, runs: Sequence[Run]) -> None:
    handles, labels = panel.get_legend_handles_labels()
    if len(labels) > 1 or len(runs) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))


def _by_request(
    title: str, unit: str, runs: Sequence[Run], values: Callable[[Mapping[str, Any]], list[float | None]]
) -> Figure:
    """Draw one value per request, in the order in which the requests were sent."""
    with _style():
        figure, (panel,) = _figure(title, runs)
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
        panel.set_xlabel("request, in order of sending")
        panel.set_ylabel(unit)
        _legend(figure, panel, runs)
    return figure


def _ttfts_s(result: Mapping[str, Any]) -> list[float | None]:
    return [None if error else ttft for ttft, error in zip(result["ttfts"], result["errors"], strict=True)]


def _tpots_ms(result: Mapping[str, Any]) -> list[float | None]:
    return [
        None if error or not gaps else 1e3 * sum(gaps) / len(gaps)
        for gaps, error in zip(result["itls"], result["errors"], strict=True)
    ]


def draw_ttft(runs: Sequence[Run]) -> Figure:
    """Draw how long each request waited for its first token."""
    return _by_request("Wait for the first token (TTFT)", "seconds", runs, _ttfts_s)


def draw_tpot(runs: Sequence[Run]) -> Figure:
    """Draw the mean time of each request's further tokens."""
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
    with _style():
        figure, axes = _figure("Requests and KV memory over time", runs, len(panels))
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
        _legend(figure, axes[0], runs)
    return figure


def _timeline(result: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    columns = dict(lookup(result, "floodplain.timeline") or {})
    used, total = columns.get("kv_used_blocks", []), columns.get("kv_total_blocks", [])
    if any(total):
        columns["kv_use"] = [100.0 * u / t if t else 0.0 for u, t in zip(used, total, strict=True)]
    return columns


def draw_all(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return every picture that the runs give, by its name: ``ttft``, ``tpot``, ``timeline``."""
    drawn = {"ttft": draw_ttft(runs), "tpot": draw_tpot(runs), "timeline": draw_timeline(runs)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def to_svg(figure: Figure) -> str:
    """Return a figure as SVG text, the same for the same data; letters stay text."""
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every picture as ``NAME.svg`` and ``NAME.png`` into ``folder`` (made if need be); returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in draw_all(runs).items():
        svg, png = folder / f"{name}.svg", folder / f"{name}.png"
        svg.write_text(to_svg(figure), encoding="utf-8")
        with _style():
            figure.savefig(png, format="png")
        paths += [svg, png]
    return paths
