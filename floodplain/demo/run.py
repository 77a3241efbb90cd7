"""Serves the load of ``floodplain demo`` with one engine per way; measures this machine's capacity."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import Any

from floodplain.bench.engine_target import EngineTarget, started
from floodplain.bench.offline import hardware_report, run_offline
from floodplain.core.lifecycle import Lifecycle
from floodplain.demo.ways import Way
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.observe.result import RunInfo, benchmark_result
from floodplain.observe.strip import residence_columns
from floodplain.policy.registry import make_policy
from floodplain.workload.client import run_load
from floodplain.workload.goals import measure_goals
from floodplain.workload.spec import WorkloadSpec, build

CALIBRATION_TOKENS = 32
NUM_WARM_UP, WARM_UP_TOKENS = 8, 16

Run = tuple[str, dict[str, Any]]
"""A way's name and its benchmark result."""


async def serve_way(way: Way, base: EngineConfig, spec: WorkloadSpec, capacity: float, *, progress: bool) -> Run:
    """Serve the requests of ``spec`` one way; returns its name and benchmark result, ``floodplain.residence`` included.

    ``base`` has the engine flags that all ways share; ``capacity`` is the measured one, in requests per second.
    """
    lifecycles: list[Lifecycle] = []
    async with started(AsyncEngine(build_engine(way.config(base), way.make_policy()))) as engine:
        await _warm_up(engine, spec)
        engine.subscribe(lifecycles.append)
        if progress:
            print(f"{way.name}:", file=sys.stderr)
        start_s = time.monotonic()
        run = await run_offline(engine, build(spec, engine.tokenizer), progress=progress)
        info = _run_info(engine, spec, {"measured_capacity": capacity} | asdict(way.settings))
    result = benchmark_result(run.records, info, run.report, run.timeline)
    result["floodplain"]["residence"] = residence_columns(lifecycles, start_s)
    return way.name, result


async def measure_machine(base: EngineConfig, batch: WorkloadSpec) -> tuple[float, tuple[str, ...]]:
    """(requests a second that this machine sustains with a full pool, goals measured without load).

    Capacity: a full batch is timed with two output lengths; the difference is pure decoding. Both runs have the same
    prompts, and prefixes are not cached, so that nothing else differs.
    """
    alone = build_engine(replace(base, enable_prefix_caching=False), make_policy(base.policy))
    async with started(AsyncEngine(alone)) as engine:
        _, short_s, long_s = [await _time_batch(engine, batch, n) for n in (1, 1, CALIBRATION_TOKENS)]  # 1: warms up
        requests = build(batch, engine.tokenizer)
        goals = await measure_goals(EngineTarget(engine), requests)
    decode_s = max(1e-6, long_s - short_s) / (CALIBRATION_TOKENS - 1)
    mean_output = sum(request.max_tokens for request in requests) / len(requests)
    return len(requests) / (short_s + decode_s * mean_output), goals


def _run_info(engine: AsyncEngine, spec: WorkloadSpec, facts: dict[str, Any]) -> RunInfo:
    return RunInfo(
        backend="floodplain",
        model_id=engine.model_name,
        tokenizer_id=engine.model_name,
        request_rate=spec.request_rate,
        seed=spec.seed,
        goodput=spec.goodput,
        config=facts | asdict(engine.engine.config) | asdict(spec),
        hardware=hardware_report(engine.engine.config.device, engine.engine.links),
    )


async def _warm_up(engine: AsyncEngine, spec: WorkloadSpec) -> None:
    """Serve a few other texts, so that threads, allocator and learned prices are alike for every way."""
    batch = replace(spec, num_prompts=NUM_WARM_UP)
    await _time_batch(engine, batch, WARM_UP_TOKENS)


async def _time_batch(engine: AsyncEngine, spec: WorkloadSpec, num_tokens: int) -> float:
    """Seconds for the requests of ``spec``, with another seed, sent at once, with ``num_tokens`` output tokens each."""
    requests = build(replace(spec, seed=spec.seed + 1), engine.tokenizer)
    batch = [replace(request, arrival_s=0.0, max_tokens=num_tokens) for request in requests]
    begin = time.monotonic()
    await run_load(EngineTarget(engine), batch, progress=False)
    return time.monotonic() - begin
