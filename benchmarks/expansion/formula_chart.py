"""The chart of ``formula.py``: what streaming gains by the size of the pool, one line for each link."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from floodplain.cost.expansion import best_expansion, expansion_gain
from floodplain.observe.style import COLOURS, LINES, MARKERS, make_figure, save_figure, styled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from benchmarks.expansion.formula import Device, Results

POOLS = [10 ** (exponent / 40) for exponent in range(-60, 41)]
"""Pools over weights."""


def draw(results: Results, devices: Sequence[Device], path: Path) -> None:
    """Write the picture."""
    with styled():
        num_models = len({cell.model.name for cell in results})
        where = (
            "lines: closed form; filled: with whole layers and three slots; open: the loop in virtual time; "
            f"{num_models} models"
        )
        marks = {
            f"{device.name} ({device.link_bandwidth / 1e9:.0f} GB/s, rho {device.link_ratio:.3f})": {
                "color": COLOURS[i], "linestyle": LINES[i], "linewidth": 1.3
            }
            for i, device in enumerate(devices)
        }  # fmt: skip
        figure, (panel,) = make_figure("When it pays to let KV layers stream", where, panel_inches=3.2, key=marks)
        for i, (device, mark) in enumerate(zip(devices, marks.values(), strict=True)):
            gains = [expansion_gain(best_expansion(1, pool, device.link_ratio), 1, pool) for pool in POOLS]
            panel.plot(POOLS, gains, **mark)
            points = [
                (1 / cell.weights_per_pool, computed.gain, checked.gain)
                for cell, (computed, checked) in results.items()
                if cell.device == device
            ]
            pools, computed_gains, checked_gains = zip(*points, strict=True)
            style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": "none", "markersize": 4.5}
            panel.plot(pools, computed_gains, **style)
            panel.plot(pools, checked_gains, **style, markerfacecolor="none")
        _label(panel)
        save_figure(figure, path)


def _label(panel: Axes) -> None:
    from matplotlib.ticker import StrMethodFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.set_xlabel("memory of the KV pool, over that of the weights that a step reads")
    panel.set_ylabel("tokens/s, over those\nwithout streams")
    panel.set_ylim(bottom=0.95)
