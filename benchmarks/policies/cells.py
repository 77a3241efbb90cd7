"""The sweep over loads, mixes of lengths, pools and devices: in each cell several policies serve the same requests.

python benchmarks/policies/cells.py --seeds 1 --out benchmarks/policies/cells.json      # minutes; virtual time
python benchmarks/policies/cells_chart.py                                               # draws that
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policies.fluid import Fluid, count_on_time
from benchmarks.policies.loads import BLOCK_TOKENS, NUM_RESIDENT, TRACES, Load, goals_s, make_requests, pool_blocks
from benchmarks.policies.run import BLOCK_BYTES, COLUMNS, simulate
from benchmarks.policies.ways import LINE, PCIE, Way
from benchmarks.step_line import StepLine
from floodplain.observe.strict_json import save_result
from floodplain.policy.settings import SharingSettings, settings_for

LINE_PATIENCE, MAX_GAP_S = SharingSettings().line_patience, SharingSettings().max_gap_s
POLICIES = ("fcfs", "cfs", "fair", "paced", "timely")
SWAP_POOLS = 8
H100_LINE = StepLine(base_s=0.0300, decode_s=0.000304, prefill_token_s=0.0000909)
"""Llama-2-70B on eight H100: least squares over the 17 rows of Splitwise's measurements (``splitwise_e2e.csv``)."""
H100_BLOCK_S = BLOCK_TOKENS * 80 * 2 * 8 * 128 * 2 / 8 / 50e9
"""A block of 16 tokens over PCIe 5 (50 GB/s), a part of it on each of the eight GPUs."""
MIXES: dict[str, tuple[tuple[float, float], ...]] = {
    "chat": ((1.0, 1.0),),
    "short answers": ((1.0, 0.25),),
    "long prompts": ((3.0, 1.0),),
    "all": ((1.0, 1.0), (1.0, 0.25), (3.0, 1.0)),
}
"""(prompts, outputs) as multiples of a chat's, one request after the other."""
FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0)
NUM_STEADY = 400
"""Requests that show whether a rate can be sustained."""
SHAPES = {"burst": (30.0, 60.0), "lasting": (60.0, 0.0)}
"""Seconds above capacity, and then at it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one device."""

    factor: float
    shape: str
    mix: str
    num_resident: int = NUM_RESIDENT
    device: str = "cpu"
    trace: str = "sharegpt"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.factor:g}x {self.shape}, {self.mix}, pool of {self.num_resident}, {self.device}"

    @property
    def load(self) -> Load:
        """Its requests."""
        burst_s, tail_s = SHAPES[self.shape]
        return Load(self.name, self.factor, burst_s, tail_s, mix=MIXES[self.mix], trace=self.trace)

    @property
    def line(self) -> StepLine:
        """What its steps cost."""
        return LINE if self.device == "cpu" else H100_LINE

    @property
    def kind(self) -> tuple[str, int, str]:
        """What decides how many requests a second the device can serve."""
        return self.mix, self.num_resident, self.device

    @property
    def num_blocks(self) -> int:
        """Blocks of its pool."""
        return pool_blocks(self.num_resident, self.trace)

    def way(self, policy: str, line_patience: float = LINE_PATIENCE, max_gap_s: float | None = MAX_GAP_S) -> Way:
        """Its device under a policy; on a GPU copies take nothing from steps."""
        num_slots = 0 if policy == "fcfs" else SWAP_POOLS * self.num_blocks
        is_cpu = self.device == "cpu"
        bandwidth = PCIE if is_cpu else BLOCK_BYTES / H100_BLOCK_S
        settings = replace(settings_for(policy), line_patience=line_patience, max_gap_s=max_gap_s)
        return Way(policy, policy, bandwidth, num_slots, settings, copies_cost=is_cpu, line=self.line)


CELLS = (
    *(Cell(factor, shape, mix) for mix, shape, factor in product(MIXES, SHAPES, FACTORS)),
    *(
        Cell(factor, "burst", mix, num_resident)
        for mix, num_resident, factor in product(("chat", "all"), (12, 48), (1.5, 2.0, 3.0))
    ),
    *(Cell(factor, shape, mix, 64, "h100") for mix, shape, factor in product(("chat", "all"), SHAPES, (2.0, 3.0))),
)


@cache
def find_capacity(mix: str, num_resident: int, device: str, trace: str) -> float:
    """The highest steady rate at which FCFS keeps TTFT p99 under a second (ten bisections of the logarithm)."""
    cell = Cell(1.0, "lasting", mix, num_resident, device, trace)
    low, high = math.log(0.25), math.log(128.0)
    for _ in range(10):
        rate = math.exp((low + high) / 2)
        steady = Load("steady", 1.0, NUM_STEADY / rate, mix=MIXES[mix], trace=trace)
        run = simulate(cell.way("fcfs"), make_requests(steady, rate, 11), cell.num_blocks)
        is_kept = float(np.quantile(run["ttft_s"], 0.99)) < 1.0
        low, high = (math.log(rate), high) if is_kept else (low, math.log(rate))
    return math.exp(low)


def serve(
    cell: Cell, seeds: list[int], policies: list[str], line_patience: float, max_gap_s: float | None
) -> dict[str, Any]:
    """Some policies in one cell: columns of the table, by policy."""
    capacity = find_capacity(cell.mix, cell.num_resident, cell.device, cell.trace)
    goals = goals_s(MIXES[cell.mix], cell.line, cell.trace)
    rows: dict[str, Any] = {}
    for policy in policies:
        way = cell.way(policy, line_patience, max_gap_s)
        runs = [simulate(way, make_requests(cell.load, capacity, seed), cell.num_blocks) for seed in seeds]
        found = {name: column([run | {"goals_s": goals} for run in runs]) for name, column in COLUMNS.items()}
        rows[policy] = {"requests": sum(len(run["ttft_s"]) for run in runs)}
        rows[policy] |= {name: round(value, 4) for name, value in found.items()}
    return {"cell": cell.name, "capacity": round(capacity, 3), "goals_s": goals, "policies": rows}


def find_rates(cells: list[Cell], results: list[dict[str, Any]], seed: int) -> dict[tuple[str, int, str], float]:
    """The most requests a second that ``timely`` ends in a cell of each kind."""
    rates: dict[tuple[str, int, str], float] = defaultdict(float)
    for cell, result in zip(cells, results, strict=True):
        outputs = [one.params.max_tokens for one in make_requests(cell.load, result["capacity"], seed)]
        rate = result["policies"]["timely"]["tokens/s"] / float(np.mean(outputs))
        rates[cell.kind] = max(rates[cell.kind], rate)
    return rates


def refer(cell: Cell, result: dict[str, Any], rate: float, seeds: list[int], line_patience: float) -> dict[str, float]:
    """What a fluid server attains in a cell, with the promise on waiting and without."""
    ttft_goal_s, tpot_goal_s = result["goals_s"]
    attained = {"fluid": 0.0, "fluid, no promise": 0.0}
    for seed, (name, patience) in product(seeds, zip(attained, (line_patience, math.inf), strict=True)):
        requests = make_requests(cell.load, result["capacity"], seed)
        window_s = ttft_goal_s + tpot_goal_s * float(np.mean([one.params.max_tokens for one in requests]))
        alone_s = [cell.line.base_s + cell.line.prefill_token_s * len(one.prompt_token_ids) for one in requests]
        can_attain = [ttft_s <= ttft_goal_s for ttft_s in alone_s]
        num_on_time = count_on_time(
            [one.arrival_s for one in requests], can_attain, Fluid(1 / rate, window_s, patience)
        )
        attained[name] += num_on_time / len(requests) / len(seeds)
    return {name: round(value, 4) for name, value in attained.items()}


def print_table(results: list[dict[str, Any]]) -> None:
    """A line for each cell: attainment of the policies, then the last one's latencies as multiples of FCFS's."""
    names, references = list(results[0]["policies"]), list(results[0]["references"])
    ratios = ("TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "E2E p99", "longest gap", "tokens/s")
    print("| cell | " + " | ".join(names + references) + " | " + " | ".join(f"{name} / FCFS" for name in ratios) + " |")
    print("|---" * (1 + len(names) + len(references) + len(ratios)) + "|")
    for result in results:
        rows = result["policies"]
        shares = [*(rows[policy]["attained"] for policy in names), *result["references"].values()]
        attained = [f"{share:.0%}" for share in shares]
        parts = [f"{rows[names[-1]][name] / max(rows['fcfs'][name], 1e-9):.2f}" for name in ratios]
        print(f"| {result['cell']} | " + " | ".join((*attained, *parts)) + " |")


def summarise(results: list[dict[str, Any]]) -> str:
    """What each policy and reference attains, and in how many cells each policy keeps which bound beside FCFS."""
    names, lines = list(results[0]["policies"]), list[str]()
    for name in results[0]["references"]:
        lines.append(f"{name}: attained {np.mean([result['references'][name] for result in results]):.1%}")
    for policy in names:
        pairs = [(result["policies"][policy], result["policies"]["fcfs"]) for result in results]
        below = [result["cell"] for result, (row, fcfs) in zip(results, pairs, strict=True)
                 if row["attained"] < fcfs["attained"] - 0.01]  # fmt: skip
        lines.append(
            f"{policy}: attained {np.mean([row['attained'] for row, _ in pairs]):.1%}; "
            f"{_count_kept(pairs, 'E2E p50', 1.05)}; {_count_kept(pairs, 'E2E p99', 1.15)}; "
            f"longest gap {max(row['longest gap'] for row, _ in pairs):.1f} s; "
            f"more than 1 point below fcfs in {len(below)} ({'; '.join(below) or 'none'})"
        )
    return "\n".join([*lines, *_beside_paced(results, names[-1])])


def _count_kept(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str, most: float) -> str:
    """In how many cells a column is at most so many times FCFS's."""
    ratios = [row[name] / fcfs[name] for row, fcfs in pairs]
    num_kept = sum(ratio <= most for ratio in ratios)
    return f"{name} <= {most} in {num_kept} of {len(ratios)}, median {np.median(ratios):.2f}, worst {max(ratios):.2f}"


def _beside_paced(results: list[dict[str, Any]], policy: str) -> list[str]:
    """The last policy in mild cells: those where ``paced`` is within 2 points of the best of all."""
    rows = [result["policies"] for result in results]
    if policy == "paced" or "paced" not in rows[0]:
        return []
    near = [one for one in rows if one["paced"]["attained"] >= max(row["attained"] for row in one.values()) - 0.02]
    as_soon = sum(one[policy]["TTFT p99"] <= one["paced"]["TTFT p99"] + 0.02 * one["fcfs"]["TTFT p99"] for one in near)
    return [
        f"paced is within 2 points of the best in {len(near)}; {policy}'s TTFT p99 is no later in {as_soon} of them"
    ]


def find_references(
    workers: ProcessPoolExecutor, cells: list[Cell], results: list[dict[str, Any]], args: argparse.Namespace
) -> list[dict[str, float]]:
    """Of each cell (``refer``); none if ``timely`` was not measured, whose rates they need."""
    if "timely" not in args.policies:
        return [{} for _ in cells]
    rates = find_rates(cells, results, args.seeds[0])
    one = partial(refer, seeds=args.seeds, line_patience=args.line_patience)
    return list(workers.map(one, cells, results, [rates[cell.kind] for cell in cells]))


def main() -> None:
    """Serve all cells, print the table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="fcfs first")
    parser.add_argument("--line-patience", type=float, default=LINE_PATIENCE)
    parser.add_argument("--max-gap", type=float, default=MAX_GAP_S, help="seconds")
    parser.add_argument("--lengths", choices=list(TRACES), default="sharegpt", help="of prompts and outputs")
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = [replace(cell, trace=args.lengths) for cell in CELLS if args.only in cell.name][:: args.every]
    with ProcessPoolExecutor() as workers:
        settings = {"line_patience": args.line_patience, "max_gap_s": args.max_gap}
        one = partial(serve, seeds=args.seeds, policies=args.policies, **settings)
        results = list(workers.map(one, cells))
        for result, references in zip(results, find_references(workers, cells, results, args), strict=True):
            result["references"] = references
    print_table(results)
    print(summarise(results))
    if args.out:
        kept = {"seeds": args.seeds, "lengths": args.lengths, "line_patience": args.line_patience}
        kept |= {"max_gap": args.max_gap, "cells": results}
        save_result(args.out, kept)


if __name__ == "__main__":
    main()
