"""Plots of ``floodplain demo``: dropped layers (after KunServe, Figure 12), lent memory (after AQUA, Figure 12)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from floodplain.observe.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PINK,
    SKY,
    VERMILLION,
    label_ends,
    make_figure,
    styled,
)
from floodplain.observe.table import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 1.6
_ROW_SHARE = 0.17
"""Height of a row of events, relative to a panel."""
HEADROOM = 1.08
"""Top of a panel as a multiple of its highest value."""
SMOOTH_S = 2.0
"""Seconds over which tokens per second are averaged."""
MIB = 2**20
PHASE_COLOURS: Mapping[str, str] = {
    "dropping": ORANGE, "exchanging": ORANGE, "pipelined": "#BFE3D6", "restoring": "#E3BFD3",
}  # fmt: skip
PHASE_WORDS: Mapping[str, str] = {"pipelined": "dropped: one pipeline", "restoring": "restoring"}

Columns = Mapping[str, Sequence[float]]
Event = tuple[float, float, str, str]
"""Begin, end, colour, and a text or none."""


def draw_relief(cluster: Mapping[str, Any], where: str) -> Figure:
    """Draw ``cluster`` of ``demo.json`` (``floodplain demo --cluster``); ``where``: the model and the machine."""
    scene = cluster["scene"]
    more = f"{scene['num_spike_users']} instead of {scene['num_users']}"
    rows: Mapping[str, list[Event]] = {
        "users": [(scene["spike_s"], scene["calm_s"], PALE, more)],
        "layers": [
            (span["from_s"], span["to_s"], PHASE_COLOURS[span["phase"]], PHASE_WORDS.get(span["phase"], ""))
            for span in cluster["spans"]
        ],
    }
    with styled():
        figure, (events, blocks, requests, waits) = make_figure(
            _relief_title(cluster), where, 4, PANEL_INCHES, heights=(len(rows) * _ROW_SHARE, 1, 1, 1)
        )
        waits.set_xlim(0, max([1.0, *cluster["samples"]["time_s"], *cluster["requests"]["sent_s"]]))
        _draw_events(events, rows)
        _draw_blocks(blocks, cluster["samples"])
        _draw_requests(requests, cluster["samples"])
        _draw_waits(waits, cluster["requests"])
        waits.set_xlabel("seconds since the load began; a dot stands where its request was sent")
        figure.align_ylabels([blocks, requests, waits])
    return figure


def _relief_title(cluster: Mapping[str, Any]) -> str:
    totals, blocks = cluster["totals"], cluster["blocks"]
    if not totals["num_drops"]:
        return "A spike, and no layer was dropped"
    usable_s = totals["usable_s"] / totals["num_drops"]
    dropped = f"{blocks['before']} KV blocks become {blocks['dropped'] or '-'} in a spike, usable in {usable_s:.2f} s"
    restored = f"restored in {totals['restored_s'] / totals['num_restores']:.1f} s" if totals["num_restores"] else ""
    return f"{dropped}\nLayers {restored or 'were not restored'}; {cluster['failed']} requests failed"


def _draw_events(panel: Axes, rows: Mapping[str, Sequence[Event]]) -> None:
    """A row of bars for each name, above the panels; a text stands at the begin of its bar."""
    end_s = panel.get_xlim()[1]
    for row, events in enumerate(rows.values()):
        for from_s, to_s, colour, words in events:
            panel.barh(row, to_s - from_s, left=from_s, height=0.8, color=colour, linewidth=0)
            is_late = from_s > 0.8 * end_s
            panel.annotate(
                words, (to_s if is_late else from_s, row), (-3 if is_late else 3, 0), textcoords="offset points",
                va="center", ha="right" if is_late else "left", fontsize=8.5,
            )  # fmt: skip
    panel.set_yticks(range(len(rows)), list(rows))
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(length=0)
    panel.grid(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_visible(False)


def _draw_blocks(panel: Axes, samples: Columns) -> None:
    times_s, used, blocks = samples["time_s"], samples["used_blocks"], samples["blocks"]
    panel.fill_between(times_s, used, step="post", color=BLUE, linewidth=0)
    panel.plot(times_s, blocks, drawstyle="steps-post", color=BLACK, linewidth=1.5)
    panel.set_ylim(0, HEADROOM * max([1, *blocks]))
    panel.set_ylabel("KV memory\n(blocks)")
    label_ends(panel, [(_last(blocks), "in all", BLACK), (_last(used), "in use", BLUE)], PANEL_INCHES)


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0


def _draw_requests(panel: Axes, samples: Columns) -> None:
    running, waiting = samples["num_running"], samples["num_waiting"]
    panel.stackplot(samples["time_s"], running, waiting, step="post", colors=[SKY, VERMILLION])
    panel.set_ylim(0, HEADROOM * max([1, *(sum(pair) for pair in zip(running, waiting, strict=True))]))
    panel.set_ylabel("requests")
    ends = [(_last(running) / 2, "running", BLUE), (_last(running) + _last(waiting), "waiting", VERMILLION)]
    label_ends(panel, ends, PANEL_INCHES)


def _draw_waits(panel: Axes, requests: Mapping[str, Sequence[Any]]) -> None:
    pairs = list(zip(requests["sent_s"], requests["ttft_s"], strict=True))
    known = [(sent_s, ttft_s) for sent_s, ttft_s in pairs if ttft_s is not None]
    points = zip(*known, strict=True) if known else ((), ())
    panel.plot(*points, color=GREEN, marker="o", markersize=3.5, linestyle="none")
    lost = [sent_s for sent_s, ttft_s in pairs if ttft_s is None]
    panel.set_ylim(bottom=0)
    if lost:
        panel.plot(lost, [0.0] * len(lost), color=VERMILLION, marker="x", linestyle="none", clip_on=False)
        label_ends(panel, [(0.0, "x: failed", VERMILLION)], PANEL_INCHES)
    panel.set_ylabel("first token\nTTFT (s)")


def draw_lending(scene: Mapping[str, Any], where: str) -> Figure:
    """Draw ``leases`` of ``demo.json``, the demo's second part; ``where``: the model and the machine."""
    columns: Columns = scene["samples"]
    times = scene["scene"]
    rows: Mapping[str, list[Event]] = {"lender's load": [(times["double_s"], times["light_s"], PALE, "doubled")]}
    with styled():
        figure, (events, memory, away, tokens) = make_figure(
            _lending_title(scene), where, 4, PANEL_INCHES, heights=(len(rows) * _ROW_SHARE, 1, 1, 1)
        )
        tokens.set_xlim(0, columns["time_s"][-1])
        _draw_events(events, rows)
        _draw_memory(memory, columns)
        _draw_away(away, columns)
        tokens.plot(*token_rate(columns["time_s"], columns["num_tokens"]), color=BLUE, linewidth=1.3)
        tokens.set_ylim(bottom=0)
        tokens.set_ylabel("borrower\n(tokens/s)")
        tokens.set_xlabel("seconds since the scene began")
        figure.align_ylabels([memory, away, tokens])
    return figure


def _lending_title(scene: Mapping[str, Any]) -> str:
    lent, recalls = format_number(scene["most_lent_bytes"] / MIB), scene["recalls"]
    if not recalls["num"]:
        return f"{lent} MiB lent to another server; nothing was recalled"
    again = ", and lent again" if scene["samples"]["lent_bytes"][-1] > 0 else ""
    return f"{lent} MiB lent to another server, recalled in {format_number(recalls['mean_s'])} s{again}"


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
    _draw_stack(panel, columns["time_s"], [(used, "in use", BLUE), (free, "free", PALE), (lent, "lent", SKY)])
    panel.set_ylabel("lender's\nmemory (MiB)")


def _draw_away(panel: Axes, columns: Columns) -> None:
    peer, host = ([value / MIB for value in columns[name]] for name in ("peer_bytes", "host_bytes"))
    _draw_stack(panel, columns["time_s"], [(peer, "borrowed", SKY), (host, "host memory", PINK)])
    panel.set_ylabel("borrower's KV\naway (MiB)")


def _draw_stack(panel: Axes, times_s: Sequence[float], layers: Sequence[tuple[Sequence[float], str, str]]) -> None:
    panel.stackplot(times_s, *(values for values, _, _ in layers), step="post", colors=[c for _, _, c in layers])
    panel.set_ylim(bottom=0)
    ends, below = [], 0.0
    for values, words, colour in layers:
        ends.append((below + values[-1] / 2, words, GREY if colour == PALE else colour))
        below += values[-1]
    label_ends(panel, ends, PANEL_INCHES)
