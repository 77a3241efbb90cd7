"""The same requests in several ways that take turns on the machine: ``measure.py LOAD CAPACITY SEED TRACES WAY...``.

It prints one JSON object per way, on a line; a way that is named twice runs twice, each on its own. One process,
because the factor by which emulated links are slowed is measured once in each; only runs of one process are compared.
``-`` stands for no folder of traces. Seeds with commas between them are one for each way.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.fairness.lane import Lane, run_in_turns
from benchmarks.fairness.ways import WAYS
from benchmarks.fairness.workloads import make_requests, make_warm_up, pool_bytes
from benchmarks.run_columns import latency_lists
from floodplain.bench.offline import hardware_report, report_between
from floodplain.core.request import FinishReason
from floodplain.engine.build import build_engine, kv_bytes_per_token
from floodplain.model.weights.open_model import open_model
from floodplain.workload.goals import sample_requests, unloaded_goals_s
from floodplain.workload.records import LoadRequest


def main(
    names: Sequence[str], load: str, capacity: float, seeds: Sequence[int], traces: Path | None
) -> list[dict[str, Any]]:
    """Run ``load`` in the ways of these names, each with its seed; ``capacity`` scales the load's rates."""
    source = open_model("smollm2")
    tokenizer = source.load_tokenizer()
    kv_memory = pool_bytes(tokenizer, kv_bytes_per_token(source.config, "bfloat16"))
    requests = {seed: make_requests(load, capacity, seed, tokenizer, traces) for seed in seeds}
    ways = [WAYS[name] for name in names]
    lanes = [
        Lane(build_engine(way.config(kv_memory, seed), way.make_policy()))
        for way, seed in zip(ways, seeds, strict=True)
    ]
    for lane, seed in zip(lanes, seeds, strict=True):
        lane.load(make_warm_up(seed, tokenizer))  # threads, allocator, prices
        lane.run()
    gc.freeze()  # the more engines there are the longer it takes to look at them all, and every lane would pay for all
    goals_s = measure_goals(lanes[0], requests[seeds[0]])
    before = [lane.engine.stats() for lane in lanes]
    begins_s = [lane.load(requests[seed]) for lane, seed in zip(lanes, seeds, strict=True)]
    run_in_turns(lanes)
    about = {
        "process": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": load,
        "capacity": capacity,
        "goals_s": goals_s,
    }
    return [
        {
            "way": way.name,
            **about,
            "seed": seed,
            "num_requests": len(requests[seed]),
            **_times(lane, begin_s, len(requests[seed])),
            "engine": asdict(report_between(stats, lane.engine.stats())),
            "limited_steps": _since(stats.limited_steps, lane.engine.stats().limited_steps),
            "config": asdict(lane.engine.config),
            "sharing": asdict(way.sharing),
            "hardware": asdict(hardware_report(lane.engine.config.device, lane.engine.links)),
        }
        for way, seed, lane, begin_s, stats in zip(ways, seeds, lanes, begins_s, before, strict=True)
    ]


def measure_goals(lane: Lane, requests: Sequence[LoadRequest]) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds, from a few requests like these, each alone on the machine."""
    lives = []
    for request in sample_requests(requests):
        lane.load([request])
        lane.run()
        lives += [life for life, _ in lane.ended]
    goals_s = unloaded_goals_s((life.arrival_s, life.token_times_s) for life in lives[1:])  # the first one warms up
    return round(goals_s["ttft"], 4), round(goals_s["tpot"], 4)


def _times(lane: Lane, begin_s: float, num_requests: int) -> dict[str, Any]:
    done = [life for life, reason in lane.ended if reason is FinishReason.LENGTH]
    if len(done) < num_requests:
        sys.exit(f"{num_requests - len(done)} of {num_requests} requests failed")
    done.sort(key=lambda life: life.arrival_s)
    return {
        "duration_s": max(life.token_times_s[-1] for life in done) - begin_s,
        **latency_lists((life.arrival_s, life.token_times_s) for life in done),
    }


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: number - before.get(name, 0) for name, number in now.items()}


if __name__ == "__main__":
    load, capacity, seed, traces, *names = sys.argv[1:]
    given = [int(one) for one in seed.split(",")]
    seeds = given if len(given) > 1 else given * len(names)
    for run in main(names, load, float(capacity), seeds, None if traces == "-" else Path(traces)):
        print(json.dumps(run))
