"""Draws result.json: what turns and a drop make of tokens per second and mean E2E, beside waiting replicas.

python -m benchmarks.relief.chart      # writes result.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from floodplain.observe.style import COLOURS, GREY, area, make_figure, save_figure, styled

HERE = Path(__file__).parent
WAYS = {"host": "turns over the host", "drop": "drop and restore"}
COLUMNS = {"tokens/s": "tokens/s", "E2E mean": "mean E2E"}
_PAIRS = [(column, way) for column in COLUMNS for way in WAYS]
BARS = [
    (column, way, f"{COLUMNS[column]}, {WAYS[way]}", colour)
    for (column, way), colour in zip(_PAIRS, COLOURS, strict=False)
]
"""Column, way, label and colour."""
WIDTH = 0.2


def main() -> None:
    """A panel for each ratio of weights to KV; the faster link only, since both look alike."""
    results = json.loads((HERE / "result.json").read_text())["cells"]
    link = max(result["link"] for result in results)
    results = [result for result in results if result["link"] == link]
    ratios = sorted({result["ratio"] for result in results})
    with styled():
        where = f"two instances, {link / 1e9:g} GB/s between them, virtual time; replicas that wait are 1"
        key = {label: area(colour) for _, _, label, colour in BARS}
        figure, panels = make_figure("Turns and drops, by burst and by memory", where, len(ratios), 1.7, key=key)
        for panel, ratio in zip(panels, ratios, strict=True):
            _draw(panel, [result for result in results if result["ratio"] == ratio])
            panel.set_ylabel(f"weights {ratio:g}x KV\n(waiting: 1)")
        panels[-1].set_xlabel("burst: times the stable rate, and its length")
        save_figure(figure, HERE / "result.png")


def _draw(panel: Any, results: list[dict[str, Any]]) -> None:
    for index, (column, way, _, colour) in enumerate(BARS):
        heights = [result["ways"][way][column] / result["ways"]["wait"][column] for result in results]
        places = [place + (index - 1.5) * WIDTH for place in range(len(results))]
        panel.bar(places, [height - 1 for height in heights], WIDTH, bottom=1, color=colour)
    panel.axhline(1.0, color=GREY, linewidth=0.8)
    panel.set_ylim(0.5, 1.6)
    panel.set_xticks(range(len(results)), [f"{one['factor']:g}x, {one['burst_s']:g} s" for one in results])


if __name__ == "__main__":
    main()
