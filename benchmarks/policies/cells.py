"""The sweep over loads, mixes of lengths, pools and devices: in each cell several policies serve the same requests.

python benchmarks/policies/cells.py --seeds 1 --out benchmarks/policies/cells.json      # minutes; virtual time
python benchmarks/policies/cells.py --policies fcfs timely --out benchmarks/policies/timely.json
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from loads import BLOCK_TOKENS, NUM_RESIDENT, Load, goals_s, make_requests, pool_blocks
from run import BLOCK_BYTES, COLUMNS, simulate
from ways import LINE, PCIE, Way

from floodplain.files.results import write_result
from floodplain.policy.settings import settings_for
from floodplain.sim.executor import StepLine

POLICIES = ("fcfs", "cfs", "fair", "timely", "paced")
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

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.factor:g}x {self.shape}, {self.mix}, pool of {self.num_resident}, {self.device}"

    @property
    def load(self) -> Load:
        """Its requests."""
        burst_s, tail_s = SHAPES[self.shape]
        return Load(self.name, self.factor, burst_s, tail_s, mix=MIXES[self.mix])

    @property
    def line(self) -> StepLine:
        """What its steps cost."""
        return LINE if self.device == "cpu" else H100_LINE

    def way(self, policy: str) -> Way:
        """Its device under a policy; on a GPU copies take nothing from steps."""
        num_slots = 0 if policy == "fcfs" else SWAP_POOLS * pool_blocks(self.num_resident)
        is_cpu = self.device == "cpu"
        bandwidth = PCIE if is_cpu else BLOCK_BYTES / H100_BLOCK_S
        settings = settings_for(policy)
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
def find_capacity(mix: str, num_resident: int, device: str) -> float:
    """The highest steady rate at which FCFS keeps TTFT p99 under a second (ten bisections of the logarithm)."""
    cell = Cell(1.0, "lasting", mix, num_resident, device)
    low, high = math.log(0.25), math.log(128.0)
    for _ in range(10):
        rate = math.exp((low + high) / 2)
        steady = Load("steady", 1.0, NUM_STEADY / rate, mix=MIXES[mix])
        run = simulate(cell.way("fcfs"), make_requests(steady, rate, 11), pool_blocks(num_resident))
        is_kept = float(np.quantile(run["ttft_s"], 0.99)) < 1.0
        low, high = (math.log(rate), high) if is_kept else (low, math.log(rate))
    return math.exp(low)


def serve(cell: Cell, seeds: list[int], policies: list[str]) -> dict[str, Any]:
    """Some policies in one cell: columns of the table, by policy."""
    capacity = find_capacity(cell.mix, cell.num_resident, cell.device)
    goals = goals_s(MIXES[cell.mix], cell.line)
    rows: dict[str, Any] = {}
    for policy in policies:
        runs = [
            simulate(cell.way(policy), make_requests(cell.load, capacity, seed), pool_blocks(cell.num_resident))
            for seed in seeds
        ]
        found = {name: column([run | {"goals_s": goals} for run in runs]) for name, column in COLUMNS.items()}
        rows[policy] = {"requests": sum(len(run["ttft_s"]) for run in runs)}
        rows[policy] |= {name: round(value, 4) for name, value in found.items()}
    return {"cell": cell.name, "capacity": round(capacity, 3), "goals_s": goals, "policies": rows}


def print_table(results: list[dict[str, Any]]) -> None:
    """A line for each cell: attainment of the policies, then the last one's latencies as multiples of FCFS's."""
    names = list(results[0]["policies"])
    ratios = ("TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "E2E p99", "longest gap", "tokens/s")
    print("| cell | " + " | ".join(names) + " | " + " | ".join(f"{name} / FCFS" for name in ratios) + " |")
    print("|---" * (1 + len(names) + len(ratios)) + "|")
    for result in results:
        rows = result["policies"]
        attained = [f"{rows[policy]['attained']:.0%}" for policy in names]
        parts = [f"{rows[names[-1]][name] / max(rows['fcfs'][name], 1e-9):.2f}" for name in ratios]
        print(f"| {result['cell']} | " + " | ".join((*attained, *parts)) + " |")


def summarise(results: list[dict[str, Any]]) -> str:
    """What the last policy attains, in how many cells it is within two points of the best, and its price."""
    policy = list(results[0]["policies"])[-1]
    attained = [{name: row["attained"] for name, row in result["policies"].items()} for result in results]
    near = sum(one[policy] >= max(one.values()) - 0.02 for one in attained)
    names = [result["cell"] for result in results]
    below = [name for name, one in zip(names, attained, strict=True) if one[policy] < one["fcfs"] - 0.01]
    rows = [(result["policies"][policy], result["policies"]["fcfs"]) for result in results]
    kept = {
        name: sum(row[name] <= most * fcfs[name] for row, fcfs in rows)
        for name, most in (("E2E p50", 1.05), ("E2E p99", 1.15))
    }
    return (
        f"{policy} attains {sum(one[policy] for one in attained) / len(attained):.1%} on average, is within 2 points "
        f"of the best in {near} of {len(results)} cells and more than 1 point below fcfs in {len(below)} "
        f"({'; '.join(below) or 'none'}); E2E p50 is at most 1.05 times fcfs's in {kept['E2E p50']}, p99 at most 1.15 "
        f"times in {kept['E2E p99']}; the longest gap is {max(row['longest gap'] for row, _ in rows):.1f} s"
    )


def main() -> None:
    """Serve all cells, print the table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="fcfs first")
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = [cell for cell in CELLS if args.only in cell.name]
    with ProcessPoolExecutor() as workers:
        results = list(workers.map(partial(serve, seeds=args.seeds, policies=args.policies), cells))
    print_table(results)
    print(summarise(results))
    if args.out:
        write_result(args.out, json.dumps({"seeds": args.seeds, "cells": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
