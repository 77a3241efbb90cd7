"""The chart of ``convergence.py``: expansion and tokens per second over time, and the parts of a token's latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.observe.style import COLOURS, GREY, LINES, Key, area, make_figure, save_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED = 3
"""Windows of which the tokens per second of one point are the mean."""
_PARTS: Key = {"compute": area(COLOURS[4]), "queueing": area(COLOURS[5])}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture."""
    where = (
        f"SmolLM2-135M on {result['hardware']}; pool of {result['mib']} MiB; emulated link, ratio {result['ratio']:g}"
    )
    rules: Key = {
        rule: {"color": COLOURS[i], "linestyle": LINES[i], "linewidth": 1.5} for i, rule in enumerate(result["samples"])
    }
    with styled():
        title = "How the expansion settles, and what a token waits"
        figure, (expansion, tokens, latency) = make_figure(title, where, 3, key={**rules, **_PARTS}, shares_x=False)
        tokens.sharex(expansion)
        _over_time(expansion, tokens, result["samples"], rules)
        _parts(latency, result["latency"])
        figure.align_ylabels()
        save_figure(figure, path)


def _over_time(expansion: Axes, tokens: Axes, samples: Mapping[str, Sequence[Mapping[str, float]]], rules: Key) -> None:
    for rule, rows in samples.items():
        style = rules[rule]
        times = [row["at_s"] for row in rows]
        expansion.step(times, [row["expansion"] for row in rows], where="pre", **style)
        tokens.plot(times, _smooth([row["tokens_s"] for row in rows]), **style)
    middle = next(iter(samples.values()))
    for panel in (expansion, tokens):
        panel.axvline(middle[len(middle) // 2 - 1]["at_s"], color=GREY, linewidth=0.8, linestyle=":")
        panel.set_xlim(left=0)
    expansion.set_ylabel("expansion")
    expansion.set_ylim(bottom=0.95)
    tokens.set_xlabel("seconds; at the dotted line the link becomes half as fast")
    tokens.set_ylabel(f"tokens/s\n(mean of {SMOOTHED} s)")
    tokens.set_ylim(bottom=0)


def _smooth(values: Sequence[float]) -> list[float]:
    windows = [values[max(0, end - SMOOTHED) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _parts(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names = ["1.0" if row["expansion"] == "off" else row["expansion"] for row in rows]
    compute, queueing = ([row[key] * 1e3 for row in rows] for key in ("compute_s", "queueing_s"))
    panel.barh(names, compute, color=_PARTS["compute"]["color"], height=0.6)
    panel.barh(names, queueing, left=compute, color=_PARTS["queueing"]["color"], height=0.6)
    panel.invert_yaxis()
    panel.set_ylabel("expansion")
    panel.set_xlabel("milliseconds per output token")
