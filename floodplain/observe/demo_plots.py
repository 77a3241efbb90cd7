"""Plots of ``floodplain demo``: dropped layers (after KunServe, Figure 12), lent memory (after AQUA, Figure 12)."""

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
HEADROOM = 1.3
"""Top of a panel as a multiple of its highest value, to leave room for text."""
SMOOTH_S = 2.0
"""Seconds over which tokens per second are averaged."""
MIB = 2**20
_BLUE, _RED, _GREEN, _, _ORANGE, _SKY, _BLACK = COLOURS
_SHADE, _GREY = "#f0f0f0", "#d8d8d8"
SHADES: Mapping[str, str] = {
    "dropping": "#f7b267",
    "exchanging": "#ffe08a",
    "pipelined": "#e3f1e7",
    "restoring": "#e6d3ea",
}
"""Background colours by the name of the span."""
_BOX: Mapping[str, Any] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5}
_WORDS: Mapping[str, Any] = {"va": "top", "fontsize": 8.5, "color": "#333333", "bbox": _BOX}
_EDGE = 0.16
"""Text nearer to an edge than this share of the width is aligned to its position, not centred."""

Columns = Mapping[str, Sequence[float]]


def draw_relief(cluster: Mapping[str, Any], where: str) -> Figure:
    """Draw ``cluster`` of ``demo.json`` (``floodplain demo --cluster``); ``where``: the model and the machine."""
    from matplotlib.patches import Patch

    with styled():
        title = "A spike: layers dropped for KV memory, and restored"
        figure, (blocks, requests, waits) = make_figure(title, where, 3, PANEL_INCHES)
        panels = (blocks, requests, waits)
        waits.set_xlim(0, max([1.0, *cluster["samples"]["time_s"], *cluster["requests"]["sent_s"]]))
        _draw_blocks(blocks, cluster["samples"])
        _draw_requests(requests, cluster["samples"])
        _draw_waits(waits, cluster["requests"])
        for panel in panels:
            _shade(panel, cluster)
        _say_durations(blocks, cluster)
        _say_spike(requests, cluster["scene"])
        waits.set_xlabel("seconds (dots: when the request was sent; dashed: the spike)")
        figure.align_ylabels(panels)
        drawn = _legend_entries(panels)
        seen = dict.fromkeys(span["phase"] for span in cluster["spans"])
        drawn += [(Patch(color=SHADES[phase]), phase) for phase in seen]
        figure.legend(*zip(*drawn, strict=True), loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _draw_blocks(panel: Axes, samples: Columns) -> None:
    times_s = samples["time_s"]
    panel.fill_between(times_s, samples["used_blocks"], step="post", color=_BLUE, linewidth=0, label="KV blocks in use")
    panel.plot(
        times_s, samples["blocks"], drawstyle="steps-post", color=_BLACK, linewidth=1.5, label="KV blocks in all"
    )
    panel.set_ylim(0, HEADROOM * max([1, *samples["blocks"]]))
    panel.set_ylabel("KV memory\n(blocks)")


def _draw_requests(panel: Axes, samples: Columns) -> None:
    running, waiting = samples["num_running"], samples["num_waiting"]
    panel.stackplot(
        samples["time_s"], running, waiting, step="post", colors=[_SKY, _RED],
        labels=["requests: running", "waiting, or KV moves"],
    )  # fmt: skip
    panel.set_ylim(0, HEADROOM * max([1, *(sum(pair) for pair in zip(running, waiting, strict=True))]))
    panel.set_ylabel("requests")


def _draw_waits(panel: Axes, requests: Mapping[str, Sequence[Any]]) -> None:
    pairs = list(zip(requests["sent_s"], requests["ttft_s"], strict=True))
    known = [(sent_s, ttft_s) for sent_s, ttft_s in pairs if ttft_s is not None]
    panel.plot(
        *(zip(*known, strict=True) if known else ((), ())),
        color=_GREEN, marker="o", markersize=3.5, linestyle="none", label="wait for the first token",
    )  # fmt: skip
    lost = [sent_s for sent_s, ttft_s in pairs if ttft_s is None]
    if lost:
        panel.plot(lost, [0.0] * len(lost), color=_RED, marker="x", linestyle="none", clip_on=False, label="failed")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("first token\n(s)")


def _shade(panel: Axes, cluster: Mapping[str, Any]) -> None:
    for span in cluster["spans"]:
        panel.axvspan(span["from_s"], span["to_s"], color=SHADES[span["phase"]], linewidth=0, zorder=-1)
    for key in ("spike_s", "calm_s"):
        panel.axvline(cluster["scene"][key], color="#777777", linestyle="--", linewidth=0.9)


def _say_durations(panel: Axes, cluster: Mapping[str, Any]) -> None:
    totals, begins = cluster["totals"], dict[str, float]()
    for span in cluster["spans"]:
        begins.setdefault(span["phase"], span["from_s"])
    if totals["num_drops"]:
        when = min(begins.values(), default=0.0)
        _write(panel, when, f"dropped: usable in {totals['usable_s'] / totals['num_drops']:.2f} s")
    if totals["num_restores"] and "restoring" in begins:
        _write(panel, begins["restoring"], f"restored in {totals['restored_s'] / totals['num_restores']:.2f} s")


def _say_spike(panel: Axes, scene: Mapping[str, Any]) -> None:
    middle = (scene["spike_s"] + scene["calm_s"]) / 2
    _write(panel, middle, f"spike: {scene['num_spike_users']} users, not {scene['num_users']}")


def _write(panel: Axes, when: float, words: str) -> None:
    """Write text at the top of a panel, centred at ``when`` if there is room on both sides."""
    part = when / panel.get_xlim()[1]
    side = "left" if part < _EDGE else "right" if part > 1 - _EDGE else "center"
    panel.text(when, 0.97 * panel.get_ylim()[1], words, ha=side, **_WORDS)


def draw_lending(scene: Mapping[str, Any], where: str) -> Figure:
    """Draw ``leases`` of ``demo.json``, the demo's second part; ``where``: the model and the machine."""
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
        figure.legend(*zip(*_legend_entries((memory, away)), strict=True), loc="outside lower center", ncols=2)
    return figure


def token_rate(times_s: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """Times, and the tokens per second in the ``SMOOTH_S`` before each; near the start, since the first sample."""
    when, rates = [], []
    for i in range(1, len(times_s)):
        first = min(i - 1, max(0, bisect_left(times_s, times_s[i] - SMOOTH_S)))
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
    peer, host = ([value / MIB for value in columns[name]] for name in ("peer_bytes", "host_bytes"))
    panel.stackplot(
        columns["time_s"], peer, host, step="post", colors=[_SKY, _ORANGE],
        labels=["borrower's KV in borrowed memory", "borrower's KV in host memory"],
    )  # fmt: skip
    panel.set_ylabel("borrower's KV\naway (MiB)")


def _legend_entries(panels: Sequence[Axes]) -> list[tuple[Any, str]]:
    return [pair for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True)]


def _say_recalls(scene: Mapping[str, Any]) -> str:
    recalls = scene["recalls"]
    if not recalls["num"]:
        return "nothing was taken back"
    return f"{recalls['num']} leases taken back, {format_number(recalls['mean_s'])} s from the word to free memory"
