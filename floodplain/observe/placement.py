"""Plots a placement of models: servers as rows, GPUs as cells, pairs of a producer and a consumer as arcs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from floodplain.observe.style import BLUE, make_figure, styled
from floodplain.observe.table import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 40
"""Most servers that are drawn; if there are more, the title says so."""
MAX_NAME = 14
_LENDS, _NEEDS, _NEITHER, _EMPTY = "#9ecae1", "#fdae6b", "#dddddd", "#ffffff"
_GB = 1e9

Place = tuple[float, float]


def draw_placement(document: Mapping[str, Any]) -> Figure:
    """Draw a placement: the content of the ``--out`` file of ``floodplain place``."""
    servers = document["servers"][:MAX_ROWS]
    widest = max(server["num_gpus"] for server in servers)
    with styled():
        title, where = _title(document, len(servers))
        width = max(8.0, 1.0 + 1.05 * min(widest, 24))
        figure, (panel,) = make_figure(title, where, panel_inches=0.75 * len(servers), width=width)
        places: dict[str, Place] = {}
        for row, server in enumerate(servers):
            places |= _draw_server(panel, row, server)
        for pair in document["pairs"]:
            if pair["producer"] in places and pair["consumer"] in places:
                _draw_pair(panel, places[pair["producer"]], places[pair["consumer"]])
        _finish(panel, servers, widest)
    return figure


def _draw_server(panel: Axes, row: int, server: Mapping[str, Any]) -> dict[str, Place]:
    """Draw a server's cells; return the middle of each used cell, by device."""
    from matplotlib.patches import Rectangle

    for gpu in range(server["num_gpus"]):
        panel.add_patch(Rectangle((gpu, row), 0.92, 0.5, facecolor=_EMPTY, edgecolor="#999999", linewidth=0.6))
    places: dict[str, Place] = {}
    for unit in server["units"]:
        r = unit["memory_bytes"]
        colour = _LENDS if r > 0 else _NEEDS if r < 0 else _NEITHER
        for gpu, device in zip(unit["gpus"], unit["devices"], strict=True):
            panel.add_patch(Rectangle((gpu, row), 0.92, 0.5, facecolor=colour, edgecolor="#666666", linewidth=0.6))
            text = f"{unit['model'][:MAX_NAME]}\n{r / _GB:+.3g} GB"
            panel.text(gpu + 0.46, row + 0.25, text, ha="center", va="center", fontsize=6)
            places[device] = (gpu + 0.46, row)
    return places


def _draw_pair(panel: Axes, producer: Place, consumer: Place) -> None:
    """An arc over the cells from the producer to the consumer; higher the farther they are apart."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    distance = abs(producer[0] - consumer[0])
    rise = 0.5 * distance / (distance + 1.5)  # in rows: at most the gap between two rows of cells
    top = ((producer[0] + consumer[0]) / 2, producer[1] - 2 * rise)  # a curve rises half as far as this point of it
    arc = Path([producer, top, consumer], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    path = arc if producer[1] == consumer[1] else Path([producer, consumer])
    panel.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=7, color=BLUE, linewidth=1.0))


def _title(document: Mapping[str, Any], num_shown: int) -> tuple[str, str]:
    """How much of the needed memory is matched, and how many of the servers are drawn."""
    matched, needed = document["matched_bytes"], sum(row["needs_bytes"] for row in document["consumers"])
    title = f"{format_number(matched / _GB)} of {format_number(needed / _GB)} GB that are needed are matched"
    num_servers = len(document["servers"])
    where = f"{num_servers} servers" if num_shown == num_servers else f"the first {num_shown} of {num_servers} servers"
    return title, where


def _finish(panel: Axes, servers: Sequence[Mapping[str, Any]], widest: int) -> None:
    panel.set_xlim(-0.1, widest)
    panel.set_ylim(len(servers) - 0.3, -0.6)
    panel.set_yticks([row + 0.25 for row in range(len(servers))], [server["name"] for server in servers])
    panel.set_xticks([gpu + 0.46 for gpu in range(widest)], [str(gpu) for gpu in range(widest)])
    panel.set_xlabel("GPU (blue: lends memory, orange: needs memory; arrows: from a lender to a borrower)")
    panel.grid(False)
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)
