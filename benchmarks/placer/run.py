"""How long the placer needs for clusters of models drawn from AQUA's Table 1, by their size.

python -m benchmarks.placer.run                    # all sizes, half a minute; writes result.json and curve.png
python -m benchmarks.placer.run --sizes 16 128     # some sizes; prints them, and writes nothing
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.placer.table1 import draw_cluster
from benchmarks.placer.verify import violations
from floodplain.observe.strict_json import save_result
from floodplain.observe.style import COLOURS, GREY, make_figure, save_figure, styled
from floodplain.planner.cluster import classify
from floodplain.planner.greedy import place_greedily
from floodplain.planner.placer import place

HERE = Path(__file__).parent
SIZES = (16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
LOOSE_SIZE, LOOSE_GAP = 16384, 0.02
"""From this size on a placement within this gap is good enough."""
AIMS_S = {128: 0.5, 1024: 2.0, 16384: 60.0}
TIME_LIMIT_S = 60.0
NUM_SEEDS = 10


def measure(num_gpus: int, seed: int) -> dict[str, Any]:
    """One cluster, placed and verified."""
    cluster = draw_cluster(num_gpus, seed)
    problem = classify(cluster)
    greedy = place_greedily(problem)
    began_s = time.perf_counter()
    placement = place(cluster, TIME_LIMIT_S, LOOSE_GAP if num_gpus >= LOOSE_SIZE else 0.0)
    seconds = time.perf_counter() - began_s
    wrong = violations(cluster, placement)
    assert not wrong, wrong[0]
    return {
        "num_gpus": num_gpus,
        "seed": seed,
        "seconds": round(seconds, 4),
        "objective_gb": placement.objective_bytes / 1e9,
        "bound_gb": placement.bound_bytes / 1e9,
        "gap": placement.gap,
        "greedy_gb": None if greedy is None else problem.objective(greedy) / 1e9,
        "matched_gb": sum(pair.num_bytes for pair in placement.pairs) / 1e9,
        "is_most_matched": placement.is_most_matched,
        "method": placement.method,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A line of the curve."""
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "num_gpus": rows[0]["num_gpus"],
        "median_s": statistics.median(seconds),
        "longest_s": seconds[-1],
        "aim_s": AIMS_S.get(rows[0]["num_gpus"]),
        "proven_optimal": sum(row["gap"] == 0 for row in rows),
        "most_matched": sum(row["is_most_matched"] for row in rows),
        "largest_gap": max(row["gap"] for row in rows),
    }


MARKS: Mapping[str, Mapping[str, Any]] = {
    "median of ten": {"color": COLOURS[0], "marker": "o", "markersize": 4},
    "longest of ten": {"color": COLOURS[1], "marker": "s", "markersize": 4},
    "aim": {"color": GREY, "marker": "_", "markersize": 14, "linestyle": "none"},
}


def draw(curve: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds by size, on logarithmic axes."""
    with styled():
        largest = curve[-1]
        title = f"Placing models on {largest['num_gpus']:,} GPUs takes {largest['median_s']:.1f} s (median)"
        figure, (panel,) = make_figure(title, machine(), panel_inches=2.4, key=MARKS)
        sizes = [row["num_gpus"] for row in curve]
        for column, label in (("median_s", "median of ten"), ("longest_s", "longest of ten")):
            panel.plot(sizes, [row[column] for row in curve], **MARKS[label])
        aims = [(row["num_gpus"], row["aim_s"]) for row in curve if row["aim_s"]]
        panel.plot(*zip(*aims, strict=True), **MARKS["aim"])
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("GPUs")
        panel.set_ylabel("seconds")
        save_figure(figure, path)


def machine() -> str:
    """What it ran on."""
    return f"{platform.machine()}, Python {platform.python_version()}, one thread"


def main() -> None:
    """Measure, print a line of JSON for each cluster, and write the result of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="GPUs; multiples of 8")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    args = parser.parse_args()
    measure(16, 0)  # what is loaded on first use counts for no size
    rows: list[dict[str, Any]] = []
    curve = []
    for num_gpus in args.sizes or SIZES:
        some = [measure(num_gpus, seed) for seed in range(args.seeds)]
        rows += some
        curve.append(summarise(some))
        print(json.dumps(curve[-1]), flush=True)
    if args.sizes is None:
        result = {"machine": machine(), "curve": curve, "clusters": rows}
        save_result(HERE / "result.json", result)
        draw(curve, HERE / "curve.png")


if __name__ == "__main__":
    main()
