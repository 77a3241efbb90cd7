"""Draws ``cells.json``: the share of requests that attain both goals, against the load. Prints its summary, too.

python benchmarks/policies/cells_chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.policies.cells import FACTORS, Cell, summarise
from floodplain.observe.style import GREY, LINES, MARKERS, Key, colours_of, make_figure, save_figure, styled

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
        marks = _marks(results[0])
        figure, panels = make_figure(_title(cells), where, len(PANELS), key=marks)
        for panel, (shape, mix) in zip(panels, PANELS, strict=True):
            _draw(panel, [cells[Cell(factor, shape, mix).name] for factor in FACTORS], marks)
            panel.set_ylabel(f"{mix if mix != 'all' else 'mixed lengths'},\n{shape}")
        panels[-1].set_xlabel("arrivals, as a multiple of the rate at which FCFS keeps TTFT p99 below a second")
        save_figure(figure, HERE / "attained.png")


def _title(cells: dict[str, dict[str, Any]]) -> str:
    """The shares of the default and of FCFS in one cell."""
    policies = cells[Cell(2.0, *PANELS[0]).name]["policies"]
    shares = ", ".join(f"{100 * policies[name]['attained']:.0f} % with {name}" for name in ("timely", "fcfs"))
    return f"Requests that attain both goals: {shares}\n(chat, lasting, twice the load)"


def _marks(result: dict[str, Any]) -> Key:
    """The line of each policy and reference."""
    marks: dict[str, dict[str, Any]] = {
        policy: {"color": colour, "marker": MARKERS[index], "linewidth": 2.2 if policy == "timely" else 1.2}
        for index, (policy, colour) in enumerate(colours_of(result["policies"]).items())
    }
    for index, name in enumerate(result["references"]):
        marks[name] = {"color": GREY, "linestyle": LINES[1 + index]}
    return marks


def _draw(panel: Axes, results: list[dict[str, Any]], marks: Key) -> None:
    from matplotlib.ticker import PercentFormatter

    for policy in results[0]["policies"]:
        panel.plot(FACTORS, [result["policies"][policy]["attained"] for result in results], **marks[policy])
    for name in results[0]["references"]:
        panel.plot(FACTORS, [result["references"][name] for result in results], **marks[name])
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.set_ylim(0, 1)


if __name__ == "__main__":
    main()
