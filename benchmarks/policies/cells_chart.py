"""Draws ``cells.json``: the share of requests that attain both goals, against the load. Prints its summary, too.

python benchmarks/policies/cells_chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells import FACTORS, Cell, summarise

from floodplain.observe.style import COLOURS, LINES, MARKERS, make_figure, save_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
PANELS = (("lasting", "chat"), ("burst", "chat"), ("lasting", "all"), ("burst", "all"))
"""(shape, mix) of each panel."""


def main() -> None:
    """Write ``attained.png``."""
    results = json.loads((HERE / "cells.json").read_text())["cells"]
    print(summarise(results))
    cells = {result["cell"]: result for result in results}
    with styled():
        where = "virtual time, seed 1, pool of 24 chats on two CPU cores; goals: five times an unloaded request"
        figure, panels = make_figure("Requests that attain both goals", where, len(PANELS))
        for panel, (shape, mix) in zip(panels, PANELS, strict=True):
            _draw(panel, [cells[Cell(factor, shape, mix).name] for factor in FACTORS])
            panel.set_ylabel(f"{mix if mix != 'all' else 'mixed lengths'},\n{shape}")
        panels[-1].set_xlabel("arrivals, as a multiple of the rate at which FCFS keeps TTFT p99 below a second")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        save_figure(figure, HERE / "attained.png")


def _draw(panel: Axes, results: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import PercentFormatter

    for index, policy in enumerate(results[0]["policies"]):
        shares = [result["policies"][policy]["attained"] for result in results]
        width = 2.2 if policy == "timely" else 1.2
        panel.plot(FACTORS, shares, color=COLOURS[index], marker=MARKERS[index], linewidth=width, label=policy)
    for index, name in enumerate(results[0]["references"]):
        shares = [result["references"][name] for result in results]
        panel.plot(FACTORS, shares, color="#888888", linestyle=LINES[1 + index], label=name)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.set_ylim(0, 1)


if __name__ == "__main__":
    main()
