"""Compares policies in virtual time; see README.md. Deterministic: the same arguments give the same table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import run_columns
from benchmarks.policies.loads import BLOCK_TOKENS, LOADS, Load, goals_s, make_requests, pool_blocks
from benchmarks.policies.ways import WAYS, Way, ways_of
from benchmarks.run_columns import Runs, format_cell, latency_lists
from floodplain.core.request import Request
from floodplain.core.tiers import Link, Tier
from floodplain.observe.strict_json import save_result
from floodplain.runtime.state import LoopConfig
from floodplain.sim.serving import VirtualDevice, serve

HERE = Path(__file__).resolve().parent
BLOCK_BYTES = 368_640
IN_LINE_S = 1.0
"""A request with a longer TTFT stood in line."""


def simulate(way: Way, requests: list[Request], num_blocks: int = pool_blocks()) -> dict[str, Any]:
    """Serve the requests one way, with a pool of so many blocks."""
    device = VirtualDevice(
        step_time_s=way.step_time_s,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        config=LoopConfig(max_model_len=1024, block_bytes=BLOCK_BYTES),
        link=Link(Tier.HOST, way.bandwidth, 1e-5),
        num_swap_slots=way.num_slots,
    )
    prompt_shares = [0.0]
    served = serve(
        requests,
        way.make_policy(),
        device,
        on_step=lambda state, now: prompt_shares.append(state.prices.now.prompt_share),
    )
    lives = served.lifecycles
    return {
        "way": way.name,
        "duration_s": served.duration_s,
        **latency_lists((life.arrival_s, life.token_times_s) for life in lives),
        "preemptions": served.counters.preemptions,
        "recomputed_tokens": served.counters.num_recomputed_tokens,
        "stall_s": served.stall_s,
        "prompt_share": max(prompt_shares),
        "in_line_until_s": max((life.arrival_s for life in lives if (life.ttft_s or 0.0) > IN_LINE_S), default=0.0),
    }


@cache
def find_capacity(prompts: float, outputs: float) -> float:
    """The highest steady rate at which FCFS keeps TTFT p99 under a second (two seeds, nine bisections)."""
    low, high = 1.0, 12.0
    for _ in range(9):
        rate = (low + high) / 2
        steady = Load("steady", 1.0, 300 / rate, prompts=prompts, outputs=outputs)
        worst = max(np.quantile(simulate(WAYS[0], make_requests(steady, rate, s))["ttft_s"], 0.99) for s in (11, 12))
        low, high = (rate, high) if worst < 1.0 else (low, rate)
    return low


COLUMNS: dict[str, Callable[[Runs], float | None]] = {
    **run_columns.COLUMNS,
    "E2E mean": lambda runs: float(np.mean(np.concatenate([run["e2e_s"] for run in runs]))),
}


def main() -> None:
    """Print a table for each load; keep the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--loads", nargs="+", choices=[load.name for load in LOADS], help="default: all")
    parser.add_argument("--ways", nargs="+", help="names of rows beside fcfs (default: all)")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    workers = ProcessPoolExecutor()
    result: dict[str, Any] = {"capacity": {}, "seeds": args.seeds, "loads": {}}
    for load in (load for load in LOADS if not args.loads or load.name in args.loads):
        capacity = result["capacity"][load.name] = find_capacity(load.prompts, load.outputs)
        print(
            f"\n**{load.name}** ({capacity:.2f} requests/s)\n\n| way | "
            + " | ".join(COLUMNS)
            + " | swaps | recomputes | stall | prompts | last in line |"
        )
        print("|---" * (len(COLUMNS) + 6) + "|")
        rows: dict[str, Any] = {}
        ways = [way for way in ways_of(load) if way is WAYS[0] or not args.ways or way.name in args.ways]
        begun = [[workers.submit(_serve, way, load, capacity, seed) for seed in args.seeds] for way in ways]
        for way, futures in zip(ways, begun, strict=True):
            runs = [future.result() for future in futures]
            rows[way.name] = {name: column(runs) for name, column in COLUMNS.items()}
            print(_row(way.name, rows[way.name], rows[WAYS[0].name], runs), flush=True)
        result["loads"][load.name] = rows
    save_result(args.out, result)


def _serve(way: Way, load: Load, capacity: float, seed: int) -> dict[str, Any]:
    return simulate(way, make_requests(load, capacity, seed)) | {"goals_s": goals_s(load.kinds, way.line)}


def _row(name: str, row: dict[str, float], base: dict[str, float], runs: list[dict[str, Any]]) -> str:
    cells = [format_cell(key, value, None if row is base else base[key]) for key, value in row.items()]
    cells += [str(sum(run["preemptions"][mode] for run in runs)) for mode in ("swap", "recompute")]
    cells.append(f"{sum(run['stall_s'] for run in runs) / sum(run['duration_s'] for run in runs):.2%}")
    cells.append(f"{max(run['prompt_share'] for run in runs):.2f}")
    cells.append(f"{max(run['in_line_until_s'] for run in runs):.0f} s")
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
