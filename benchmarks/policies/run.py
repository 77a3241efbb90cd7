"""Compares policies in virtual time; see README.md. Deterministic: the same arguments give the same table."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.policy.base import Policy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.executor import StepLine, VirtualExecutor, VirtualLinks
from floodplain.sim.instance import VirtualInstance
from floodplain.workload.lengths import Lengths, chat_like
from floodplain.workload.phases import Phase, phase_arrivals

HERE = Path(__file__).resolve().parent
LINE = StepLine(base_s=0.0132, decode_s=0.00064, prefill_token_s=0.0005)
"""A step of SmolLM2 in bf16 on two cores: least squares over the 4,721 steps of a FCFS burst in benchmarks/fairness."""
TURN_STEP_S, TRANSFER_S, BLOCK_S = 0.0006, 0.000143, 0.00006
"""What copies cost where the cores that compute make them, too: seconds of a step with copies, of each transfer, of
each block. From the steps of a paced burst there; on a GPU, which has copy engines, next to nothing."""
BLOCK_TOKENS, BLOCK_BYTES = 16, 368_640
NUM_RESIDENT = 24
MAX_TOKENS = 700
"""Of a prompt."""
IN_LINE_S = 1.0
"""A request with a longer TTFT stood in line."""
PCIE, NVLINK = 0.76e9, 5.4e9
"""Bytes per second: the ratio of PCIe5 and NVLink4, slowed so that the faster is half of this machine's own copies."""


def lengths(num_requests: int, seed: int) -> Lengths:
    """Chat-like, kept short: the demo's."""
    return chat_like(num_requests, np.random.default_rng(seed)).fitted(0.6, 320, 256)


def scaled(tokens: Any, factor: float) -> list[int]:
    """So many times as long, but no longer than the pool has room for."""
    return [int(number) for number in np.clip(np.round(tokens * factor), 1, MAX_TOKENS)]


def pool_blocks() -> int:
    """Room for ``NUM_RESIDENT`` requests, each at half of its output."""
    pool = lengths(2000, seed=999)
    return math.ceil(NUM_RESIDENT * float((pool.prompt_tokens + pool.output_tokens / 2).mean()) / BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Load:
    """``factor`` times capacity for ``burst_s`` seconds, after 25 requests at capacity and before ``tail_s`` at it.

    Below capacity there is neither: nobody shall have to wait. ``prompts`` and ``outputs`` are so many times as long as
    in a chat; capacity is that of requests like these.
    """

    name: str
    factor: float
    burst_s: float
    tail_s: float = 0.0
    prompts: float = 1.0
    outputs: float = 1.0

    def phases(self, capacity: float) -> list[tuple[float, float]]:
        """(requests per second, how many) of each phase."""
        burst = (self.factor * capacity, self.factor * capacity * self.burst_s)
        return [(capacity, 25), burst, (capacity, capacity * self.tail_s)] if self.factor > 1 else [burst]


LOADS = (
    Load("2x for 60 s", 2.0, 60.0, tail_s=240.0),
    Load("2.4x for 60 s", 2.4, 60.0, tail_s=360.0),
    Load("3x for 120 s", 3.0, 120.0),
    Load("half of capacity", 0.5, 240.0),
    Load("2x for 60 s, prompts twice and outputs half as long", 2.0, 60.0, tail_s=240.0, prompts=2.0, outputs=0.5),
    Load("4x for 60 s, prompts four times and outputs a quarter as long", 4.0, 60.0, 120.0, prompts=4.0, outputs=0.25),
)
"""After a burst arrivals go on until FCFS has worked its line off (a column of the table says when); under the lasting
overload they stop, as it would take it a quarter of an hour."""


@dataclass(frozen=True, slots=True)
class Way:
    """A policy, its settings, and its swap space."""

    name: str
    policy: str
    bandwidth: float = PCIE
    num_slots: int = 20_000
    settings: SharingSettings = SharingSettings()  # noqa: RUF009 - frozen
    copies_cost: bool = True

    def step_time_s(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        step_s = LINE.time_s(plan)
        if not (step_s and plan.transfers and self.copies_cost):
            return step_s
        num_blocks = sum(len(transfer.blocks) for transfer in plan.transfers)
        return step_s + TURN_STEP_S + TRANSFER_S * len(plan.transfers) + BLOCK_S * num_blocks

    def make_policy(self) -> Policy:
        """A new policy object."""
        return make_policy(self.policy, self.settings)


AQUA = SharingSettings(slice_steps=16)
WAYS = (
    Way("fcfs", "fcfs", num_slots=0),
    Way("cfs-recompute", "cfs", num_slots=0, settings=replace(AQUA, takes_turns_by_recompute=True)),
    Way("cfs-sync/pcie", "cfs", settings=replace(AQUA, is_synchronous=True)),
    Way("cfs-sync/nvlink", "cfs", NVLINK, settings=replace(AQUA, is_synchronous=True)),
    Way("cfs/pcie", "cfs", settings=AQUA),
    Way("cfs/nvlink", "cfs", NVLINK, settings=AQUA),
    Way("fair/pcie", "fair"),
    Way("fair/nvlink", "fair", NVLINK),
    Way("paced/pcie", "paced"),
    Way("paced/nvlink", "paced", NVLINK),
    Way("paced/pcie, copies cost nothing", "paced", copies_cost=False),
    *(
        Way(f"paced/pcie, swap space of {pools} pool{'s' * (pools > 1)}", "paced", num_slots=pools * pool_blocks())
        for pools in (1, 2, 4, 8)
    ),
    Way("paced, no swap space", "paced", num_slots=0),
)
TRADES = tuple(
    Way(f"paced/nvlink, --max-gap {gap_s}", "paced", NVLINK, settings=SharingSettings(max_gap_s=gap_s))
    for gap_s in (2, 3, 10, 20)
)
"""Under lasting overload, what newcomers gain those who are there lose: the setting chooses where."""
CHOICES = tuple(
    Way(
        f"paced/pcie, visitors {share}, --pace {pace}, --slice {steps}",
        "paced",
        settings=SharingSettings(visitor_share=share, pace=pace, slice_steps=steps),
    )
    for share, pace, steps in (
        (0.3, 12.0, 4), (0.4, 12.0, 4), (0.5, 3.0, 5), (0.5, 2.5, 5), (0.5, 2.0, 4), (0.3, 2.0, 4), (0.4, 2.0, 3),
        (0.4, 1.5, 4),
    )
)  # fmt: skip
"""Other defaults that were considered."""
FIRST = tuple(
    Way(
        f"paced/nvlink, first tokens first up to a share of {share}",
        "paced",
        NVLINK,
        settings=SharingSettings(prompt_share=share),
    )
    for share in (0.2, 0.4, 1.0)
)
"""Where prompts are most of the work newcomers wait in line: from which part of the work on?"""


def ways_of(load: Load) -> tuple[Way, ...]:
    """What is compared under a load."""
    if load.prompts > 1:
        return (*(way for way in WAYS if "," not in way.name), *FIRST)
    choices = CHOICES if load.factor > 1 else ()
    return (*WAYS, *choices, *(TRADES if load.factor >= 3 else ()), *(FIRST if load.factor == 2 else ()))


def make_requests(load: Load, capacity: float, seed: int) -> list[Request]:
    """Requests whose prompts have nothing in common."""
    planned = load.phases(capacity)
    phases = [Phase(number / rate, rate) for rate, number in planned if number]
    phases[-1] = replace(phases[-1], duration_s=math.inf)
    count = round(sum(number for _, number in planned))
    arrivals, drawn = phase_arrivals(phases, count, 1.0, np.random.default_rng(seed)), lengths(count, seed)
    sizes = zip(scaled(drawn.prompt_tokens, load.prompts), scaled(drawn.output_tokens, load.outputs), strict=True)
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=tuple(range(1000 * index, 1000 * index + num_prompt)),
            params=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
            arrival_s=float(when),
        )
        for index, (when, (num_prompt, num_output)) in enumerate(zip(arrivals, sizes, strict=True))
    ]


def simulate(way: Way, requests: list[Request]) -> dict[str, Any]:
    """Serve the requests one way."""
    environment, policy = Environment(), way.make_policy()
    link = Link(Tier.HOST, way.bandwidth, 1e-5)
    backups = BackupTable([SlotLedger(Tier.HOST, way.num_slots)] if way.num_slots else [])
    config = LoopConfig(max_model_len=1024, block_bytes=BLOCK_BYTES)
    state = LoopState(config, BlockLedger(pool_blocks(), BLOCK_TOKENS), policy, backups, [link])
    executor = VirtualExecutor(way.step_time_s, VirtualLinks({Tier.HOST: link}, BLOCK_BYTES))
    instance = VirtualInstance(environment, Loop(state, policy), executor)
    for request in requests:
        environment.schedule(request.arrival_s, lambda request=request: instance.submit(request))  # type: ignore[misc]
    environment.run()
    lives = list(instance.lifecycles.values())
    return {
        "way": way.name,
        "duration_s": environment.now,
        "output_tokens": sum(len(life.token_times_s) for life in lives),
        "ttft_s": [round(life.ttft_s or 0.0, 4) for life in lives],
        "e2e_s": [round(life.e2e_s or 0.0, 4) for life in lives],
        "longest_gap_s": [round(max(life.itl_s, default=0.0), 4) for life in lives],
        "preemptions": state.counters.preemptions,
        "recomputed_tokens": state.counters.num_recomputed_tokens,
        "stall_s": instance.stall_s,
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


COLUMNS: dict[str, Callable[[list[dict[str, Any]]], float]] = {
    "TTFT p50": lambda runs: _quantile(runs, "ttft_s", 0.5),
    "TTFT p99": lambda runs: _quantile(runs, "ttft_s", 0.99),
    "E2E p50": lambda runs: _quantile(runs, "e2e_s", 0.5),
    "E2E p99": lambda runs: _quantile(runs, "e2e_s", 0.99),
    "E2E mean": lambda runs: float(np.mean(np.concatenate([run["e2e_s"] for run in runs]))),
    "longest gap": lambda runs: _quantile(runs, "longest_gap_s", 1.0),
    "tokens/s": lambda runs: sum(run["output_tokens"] for run in runs) / sum(run["duration_s"] for run in runs),
}


def _quantile(runs: list[dict[str, Any]], key: str, quantile: float) -> float:
    return float(np.quantile(np.concatenate([run[key] for run in runs]), quantile))


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
            + " | swaps | recomputes | stall | last in line |"
        )
        print("|---" * (len(COLUMNS) + 5) + "|")
        rows: dict[str, Any] = {}
        ways = [way for way in ways_of(load) if way is WAYS[0] or not args.ways or way.name in args.ways]
        begun = [[workers.submit(_serve, way, load, capacity, seed) for seed in args.seeds] for way in ways]
        for way, futures in zip(ways, begun, strict=True):
            runs = [future.result() for future in futures]
            rows[way.name] = {name: column(runs) for name, column in COLUMNS.items()}
            print(_row(way.name, rows[way.name], rows[WAYS[0].name], runs), flush=True)
        result["loads"][load.name] = rows
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def _serve(way: Way, load: Load, capacity: float, seed: int) -> dict[str, Any]:
    return simulate(way, make_requests(load, capacity, seed))


def _row(name: str, row: dict[str, float], base: dict[str, float], runs: list[dict[str, Any]]) -> str:
    is_base = row is base
    cells = [f"{value:.2f}" if is_base else f"{value / base[key]:.3f}x" for key, value in row.items()]
    cells += [str(sum(run["preemptions"][mode] for run in runs)) for mode in ("swap", "recompute")]
    cells.append(f"{sum(run['stall_s'] for run in runs) / sum(run['duration_s'] for run in runs):.2%}")
    cells.append(f"{max(run['in_line_until_s'] for run in runs):.0f} s")
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
