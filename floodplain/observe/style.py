"""The look of all pictures. Matplotlib is imported when one is drawn; it opens no windows and keeps no state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.files.results import write_result
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


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the common style while the context is open."""
    import matplotlib

    with matplotlib.rc_context(dict(STYLE)):
        yield


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the name's suffix. Raises WriteFailed."""
    write_result(path, render(figure, path.suffix[1:]))


def render(figure: Figure, kind: str) -> bytes:
    """A figure as ``png``, ``svg`` or ``pdf``, the same for the same data; text of an ``svg`` stays text."""
    unnamed = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, metadata=unnamed.get(kind))
    return buffer.getvalue()


def make_figure(title: str, where: str, num_panels: int = 1, panel_inches: float = 1.6) -> tuple[Figure, list[Axes]]:
    """Return a figure with stacked panels, a title, and a subtitle ``where``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.2 + panel_inches * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    panels[0].text(
        0.0, 1.03, where, transform=panels[0].transAxes, ha="left", va="bottom", fontsize=8.5, color="#555555"
    )
    return figure, list(panels)


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


def add_legend(figure: Figure, panel: Axes, runs: Sequence[Run]) -> None:
    """Put the legend of ``panel`` under the figure, unless it has only one entry and there is one run."""
    handles, labels = panel.get_legend_handles_labels()
    if len(labels) > 1 or len(runs) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
