"""Plots memory lent between two engines over time: the lender's memory, the borrower's KV, its tokens.

The form is that of AQUA's Figure 12, section 9.4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from floodplain.observe.style import COLOURS, make_figure, styled
from floodplain.observe.table import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 1.9
SMOOTH_S = 2.0
"""Seconds over which tokens per second are averaged."""
MIB = 2**20
_BLUE, _RED, _GREEN, _, _ORANGE, _SKY, _ = COLOURS
_SHADE, _GREY = "#f0f0f0", "#d8d8d8"

Columns = Mapping[str, Sequence[float]]


def draw_lending(scene: Mapping[str, Any], where: str) -> Figure:
    """Draw the results of the demo's second part (``leases`` of ``demo.json``).

    Args:
        scene: ``samples``: one list for each attribute of ``demo.watch.LendingSample``; ``scene``: when the
            lender's load doubled (``double_s``) and was light again (``light_s``); ``recalls``.
        where: The model and the machine.
    """
    columns: Columns = scene["samples"]
    with styled():
        figure, (memory, away, tokens) = make_figure(
            "Memory lent to a neighbour, taken back, and lent again", where, 3, PANEL_INCHES
        )
        _draw_memory(memory, columns)
        _draw_away(away, columns)
        tokens.plot(*token_rate(columns["time_s"], columns["num_tokens"]), color=_BLUE, linewidth=1.3)
        tokens.set_ylabel("borrower\n(tokens/s)")
        for panel in (memory, away, tokens):
            panel.axvspan(scene["scene"]["double_s"], scene["scene"]["light_s"], color=_SHADE, zorder=-1)
            panel.set_ylim(bottom=0)
        away.set_title(_say_recalls(scene), loc="right", fontsize=8.5, color="#555555")
        tokens.set_xlabel("seconds (grey: the lender's load is twice as high)")
        tokens.set_xlim(0, columns["time_s"][-1])
        figure.align_ylabels([memory, away, tokens])
        figure.legend(*_names((memory, away)), loc="outside lower center", ncols=2)
    return figure


def token_rate(
    times_s: Sequence[float], counts: Sequence[float], smooth_s: float = SMOOTH_S
) -> tuple[list[float], list[float]]:
    """Times, and the tokens per second in the ``smooth_s`` before each; near the start, since the first sample."""
    when, rates = [], []
    for i in range(1, len(times_s)):
        first = min(i - 1, max(0, bisect_left(times_s, times_s[i] - smooth_s)))
        when.append(times_s[i])
        rates.append((counts[i] - counts[first]) / (times_s[i] - times_s[first]))
    return when, rates


def _draw_memory(panel: Axes, columns: Columns) -> None:
    """Draw the lender's used, free and lent memory; white is memory that is changing hands."""
    used = [value / MIB for value in columns["used_bytes"]]
    free = [(pool - value) / MIB for pool, value in zip(columns["pool_bytes"], columns["used_bytes"], strict=True)]
    lent = [value / MIB for value in columns["lent_bytes"]]
    panel.stackplot(
        columns["time_s"], used, free, lent, step="post", colors=[_RED, _GREY, _GREEN],
        labels=["lender: in use", "lender: free", "lent"],
    )  # fmt: skip
    panel.set_ylabel("lender's memory\n(MiB)")


def _draw_away(panel: Axes, columns: Columns) -> None:
    """Draw the borrower's KV off its device."""
    peer, host = ([value / MIB for value in columns[name]] for name in ("peer_bytes", "host_bytes"))
    panel.stackplot(
        columns["time_s"], peer, host, step="post", colors=[_SKY, _ORANGE],
        labels=["borrower's KV in borrowed memory", "borrower's KV in host memory"],
    )  # fmt: skip
    panel.set_ylabel("borrower's KV\naway (MiB)")


def _names(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    pairs = [pair for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    return [handle for handle, _ in pairs], [label for _, label in pairs]


def _say_recalls(scene: Mapping[str, Any]) -> str:
    recalls = scene["recalls"]
    if not recalls["num"]:
        return "nothing was taken back"
    return f"{recalls['num']} leases taken back, {format_number(recalls['mean_s'])} s from the word to free memory"
