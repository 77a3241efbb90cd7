"""The same requests, one way after the other, in one process: ``measure.py LOAD CAPACITY SEED TRACES WAY...``.

It prints one JSON object per way, on a line. One process, because the factor by which emulated links are slowed is
measured once in each; only runs of one process are compared. ``-`` stands for no folder of traces.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from floodplain.core.plan import StepPlan, StepResult
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import build_engine, kv_bytes_per_token
from floodplain.engine.offline import OfflineRun, hardware_report, run_offline
from floodplain.engine.shell import Engine
from floodplain.engine.weights.open_model import open_model
from floodplain.sim.executor import StepLine
from floodplain.workload.records import LoadRequest, RequestRecord

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from ways import WAYS  # noqa: E402
from workloads import make_requests, make_warm_up, pool_bytes  # noqa: E402

STEP = StepLine(base_s=0.0132, decode_s=0.00064, prefill_token_s=0.0005)
"""A step of this model on two cores, as in ``benchmarks/policies``: what ``slowness`` is relative to."""

STARTED = datetime.now(UTC).isoformat(timespec="seconds")


def main(way_name: str, load: str, capacity: float, seed: int, traces: Path | None) -> dict[str, Any]:
    """Run ``load`` one way; ``capacity`` scales its rates."""
    source, way = open_model("smollm2"), WAYS[way_name]
    tokenizer = source.load_tokenizer()
    kv_memory = pool_bytes(tokenizer, kv_bytes_per_token(source.config, "bfloat16"))
    requests = make_requests(load, capacity, seed, tokenizer, traces)
    engine = AsyncEngine(build_engine(way.config(kv_memory, seed), way.make_policy()))
    plain_steps = watch_plain_steps(engine.engine)
    run = asyncio.run(_serve(engine, make_warm_up(seed, tokenizer), requests))
    done = [record for record in run.records if record.error is None]
    if len(done) < len(requests):
        sys.exit(f"{way_name}: {len(requests) - len(done)} of {len(requests)} requests failed")
    facts = engine.engine
    return {
        "process": STARTED,
        "way": way_name,
        "load": load,
        "seed": seed,
        "capacity": capacity,
        "num_requests": len(done),
        "duration_s": max(record.finished_s for record in done),
        "output_tokens": sum(len(record.token_times_s) for record in done),
        "ttft_s": [_round(record.token_times_s[0] - record.arrival_s) for record in done],
        "e2e_s": [_round(record.token_times_s[-1] - record.arrival_s) for record in done],
        "longest_gap_s": [_round(_longest_gap_s(record)) for record in done],
        "slowness": round(median(plain_steps), 4),
        "num_plain_steps": len(plain_steps),
        "engine": asdict(run.report),
        "config": asdict(facts.config),
        "sharing": asdict(way.sharing),
        "hardware": asdict(hardware_report(facts.config.device, facts.links)),
    }


async def _serve(engine: AsyncEngine, warm_up: list[LoadRequest], requests: list[LoadRequest]) -> OfflineRun:
    await engine.start()
    try:
        await run_offline(engine, warm_up, progress=False)  # threads, allocator, prices
        return await run_offline(engine, requests, progress=False)
    finally:
        await engine.close()


def watch_plain_steps(engine: Engine) -> list[float]:
    """Durations, as parts of what ``STEP`` says, of all steps to come that decode, with no copy beside them.

    They are the same work whatever the policy: how they differ between two runs, the machine differs.
    """
    executor: Any = engine._executor
    execute, ratios = executor.execute, []

    def timed(plan: StepPlan) -> StepResult:
        is_plain = not (plan.prefills or plan.transfers or engine._num_copying)
        begin = time.perf_counter()
        result: StepResult = execute(plan)
        if is_plain and plan.decodes:
            ratios.append((time.perf_counter() - begin) / STEP.time_s(plan))
        return result

    executor.execute = timed
    return ratios


def _longest_gap_s(record: RequestRecord) -> float:
    return max((b - a for a, b in pairwise(record.token_times_s)), default=0.0)


def _round(seconds: float) -> float:
    return round(seconds, 4)


if __name__ == "__main__":
    load, capacity, seed, traces, *ways = sys.argv[1:]
    for way in ways:
        run = main(way, load, float(capacity), int(seed), None if traces == "-" else Path(traces))
        print(json.dumps(run), flush=True)
