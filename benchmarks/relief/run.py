"""Which lever relieves which overload, in virtual time; see README.md. The same arguments give the same table.

python -m benchmarks.relief.run --out benchmarks/relief/result.json      # minutes of one core
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.relief.cells import CELLS, Cell
from benchmarks.relief.ways import WAYS, decide, run
from benchmarks.run_columns import COLUMNS
from floodplain.observe.strict_json import save_result

KEPT = ("attained", "TTFT p50", "TTFT p99", "TPOT p50", "E2E p50", "E2E p99", "longest gap", "tokens/s")
_SHARED: dict[tuple[float, ...], dict[str, Any]] = {}
"""Runs that the link between instances does not touch."""


def measure(cell: Cell, seed: int) -> dict[str, Any]:
    """All ways in one cell."""
    rows: dict[str, Any] = {}
    result: dict[str, Any] = {"cell": cell.name, "factor": cell.factor, "burst_s": cell.burst_s, "ratio": cell.ratio}
    result |= {"link": cell.link, "capacity": round(cell.capacity, 3), "num_streams": round(cell.num_streams, 1)}
    for way in WAYS:
        key = (cell.factor, cell.burst_s, cell.ratio, WAYS.index(way), 0.0 if not way.startswith("drop") else cell.link)
        if key not in _SHARED:
            _SHARED[key] = _row(cell, way, seed)
        rows[way] = {name: value for name, value in _SHARED[key].items() if name != "relief"}
        result |= {"relief": _SHARED[key]["relief"]} if way == "drop" else {}
    return result | {"ways": rows}


def _row(cell: Cell, way: str, seed: int) -> dict[str, Any]:
    served, groups = run(cell, way, seed)
    row: dict[str, Any] = {name: round(COLUMNS[name]([served]) or 0.0, 4) for name in KEPT}
    row["E2E mean"] = round(sum(served["e2e_s"]) / len(served["e2e_s"]), 4)
    if groups is not None:
        row["transitions"] = [
            [round(one.when_s, 2), "drop" if one.is_drop else "restore", round(one.usable_s, 3), round(one.whole_s, 3)]
            for one in groups.transitions
        ]
        loads = groups.drop_loads[:1]
        row["relief"] = {
            name: decide(cell, loads[0], is_known=is_known) if loads else None
            for name, is_known in (("known", True), ("as long again", False))
        }
    return row


def print_table(results: list[dict[str, Any]]) -> None:
    """A line for each cell: each way beside waiting replicas."""
    print("| cell | tokens/s: host | pipeline | drop | E2E mean: host | pipeline | drop | E2E p99: host | drop "
          "| TTFT p99: wait | host | drop | relief |")  # fmt: skip
    print("|---" * 13 + "|")
    for result in results:
        ways = result["ways"]
        wait = ways["wait"]
        cells = [f"{ways[way]['tokens/s'] / wait['tokens/s']:.2f}" for way in ("host", "pipeline", "drop")]
        cells += [f"{ways[way]['E2E mean'] / wait['E2E mean']:.2f}" for way in ("host", "pipeline", "drop")]
        cells += [f"{ways[way]['E2E p99'] / wait['E2E p99']:.2f}" for way in ("host", "drop")]
        cells += [f"{ways[way]['TTFT p99']:.1f} s" for way in ("wait", "host", "drop")]
        levers = [chosen["lever"] if chosen else "-" for chosen in result["relief"].values()]
        cells.append(levers[0] if levers[0] == levers[1] else " / ".join(levers))
        print(f"| {result['cell']} | " + " | ".join(cells) + " |")


def main() -> None:
    """Serve all cells, print the table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [measure(cell, args.seed) for cell in CELLS if args.only in cell.name]
    print_table(results)
    if args.out:
        save_result(args.out, {"seed": args.seed, "cells": results})


if __name__ == "__main__":
    main()
