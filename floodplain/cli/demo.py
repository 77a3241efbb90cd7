"""``floodplain demo``: serve one burst in three ways with a small real model, and show who waits for what.

The pool of KV memory holds about 24 requests (``--quick``: 12 shorter ones). The load is set by what this machine turns
out to do: a stable rate below its capacity, several times that for the burst. Capacity is measured once, and every way
gets the same requests. Everything runs in this process, from the load client to the model.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.cli.demo_ways import TITLE, WAYS, Way, paragraphs
from floodplain.cli.files import check_writable
from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.core.lifecycle import Lifecycle
from floodplain.engine.config import EngineConfig
from floodplain.policy.base import Policy
from floodplain.policy.registry import make_policy
from floodplain.workload.spec import WorkloadSpec, build

if TYPE_CHECKING:
    from floodplain.engine.async_engine import AsyncEngine
    from floodplain.observe.run_facts import RunInfo

Run = tuple[str, dict[str, Any]]
"""A way's name and its benchmark result."""

STABLE_SHARE = 0.5
"""The stable rate as a share of the measured capacity."""
CALIBRATION_TOKENS = 32
NUM_WARM_UP, WARM_UP_TOKENS = 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The flags of the demo."""

    out: Path = field(default=Path("demo"), metadata={"help": "folder for demo.json, pictures and index.html"})
    quick: bool = field(default=False, metadata={"help": "a shorter burst: about a minute in all"})
    model: str = field(default="smollm2", metadata={"help": "the model that is served"})
    seed: int = field(default=0, metadata={"help": "seed of arrivals, lengths and texts"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How large the demo is: phases of the load, requests that the pool holds at half of their output, lengths."""

    quiet_s: float
    burst_s: float
    tail_s: float
    burst_factor: float
    num_resident: int
    length_scale: float
    max_input: int
    max_output: int


FULL = _Scale(
    quiet_s=10.0, burst_s=20.0, tail_s=8.0, burst_factor=3.0,
    num_resident=24, length_scale=0.6, max_input=320, max_output=256,
)  # fmt: skip
QUICK = _Scale(
    quiet_s=1.0, burst_s=3.0, tail_s=0.5, burst_factor=4.0,
    num_resident=12, length_scale=0.3, max_input=160, max_output=128,
)  # fmt: skip


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "demo", "Serve a burst in three ways and show who waits for what."), DemoConfig)


def run(args: argparse.Namespace) -> int:
    """Run the demo, write its files, print its table."""
    demo = dataclass_from(args, DemoConfig)
    check_writable(demo.out / "demo.json")
    runs = asyncio.run(_run_demo(demo, progress=not args.quiet))
    _write(demo, runs)

    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_table, summary_rows, transposed

    if args.format == "json":
        print(to_json(_summary(runs)))
    else:
        print(format_table(*transposed(*summary_rows(runs))))
        print(f"\npictures and numbers: {demo.out / 'index.html'}")
    return 1 if any(result["failed"] for _, result in runs) else 0


async def _run_demo(demo: DemoConfig, *, progress: bool) -> list[Run]:
    scale = _scale(demo)
    sample = _shape(WorkloadSpec(request_rate=1.0, num_prompts=200, seed=demo.seed), scale)
    base = _engine_config(demo, sample, scale)
    batch = replace(sample, num_prompts=scale.num_resident)
    capacity = await _capacity(base, batch)
    spec = _burst(sample, STABLE_SHARE * capacity, scale)
    return [await serve_way(way, base, spec, capacity, progress=progress) for way in WAYS]


async def serve_way(way: Way, base: EngineConfig, spec: WorkloadSpec, capacity: float, *, progress: bool) -> Run:
    """Serve the requests of ``spec`` one way; returns its name and benchmark result, ``floodplain.residence`` included.

    Args:
        way: Who runs when, and where KV goes.
        base: The engine, whichever way.
        spec: The load.
        capacity: Requests a second, for the result.
        progress: Whether to show how far the load has come.
    """
    from floodplain.engine.offline import run_offline
    from floodplain.observe.result import benchmark_result
    from floodplain.observe.strip import residence_columns

    lifecycles: list[Lifecycle] = []
    async with _started(way.config(base), way.make_policy()) as engine:
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


@asynccontextmanager
async def _started(config: EngineConfig, policy: Policy) -> AsyncIterator[AsyncEngine]:
    from floodplain.engine.async_engine import AsyncEngine
    from floodplain.engine.build import build_engine

    engine = AsyncEngine(build_engine(config, policy))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def _run_info(engine: AsyncEngine, spec: WorkloadSpec, facts: dict[str, Any]) -> RunInfo:
    from floodplain.engine.offline import hardware_report
    from floodplain.observe.run_facts import RunInfo

    return RunInfo(
        backend="floodplain",
        model_id=engine.model_name,
        tokenizer_id=engine.model_name,
        request_rate=spec.request_rate,
        seed=spec.seed,
        config=facts | asdict(engine.engine.config) | asdict(spec),
        hardware=hardware_report(engine.engine.config.device, engine.engine.links),
    )


def _scale(demo: DemoConfig) -> _Scale:
    return QUICK if demo.quick else FULL


def _shape(spec: WorkloadSpec, scale: _Scale) -> WorkloadSpec:
    """Chat-like lengths, kept short so that a laptop's processor sees many requests."""
    return replace(
        spec,
        length_scale=scale.length_scale,
        max_input=scale.max_input,
        max_output=scale.max_output,
        ignore_eos=True,
    )


def _burst(sample: WorkloadSpec, stable_rate: float, scale: _Scale) -> WorkloadSpec:
    """Quiet, several times as much, quiet again."""
    num_prompts = round(stable_rate * (scale.quiet_s + scale.burst_factor * scale.burst_s + scale.tail_s))
    return replace(
        sample,
        request_rate=stable_rate,
        num_prompts=max(1, num_prompts),
        burst_factor=scale.burst_factor,
        burst_start=scale.quiet_s,
        burst_duration=scale.burst_s,
    )


def _engine_config(demo: DemoConfig, sample: WorkloadSpec, scale: _Scale) -> EngineConfig:
    """An engine whose pool holds ``num_resident`` requests at half of their output."""
    from floodplain.engine.build import kv_bytes_per_token
    from floodplain.engine.weights.open_model import open_model

    source = open_model(demo.model)
    requests = build(sample, source.load_tokenizer())
    mean_tokens = sum(len(r.prompt_token_ids) + r.max_tokens / 2 for r in requests) / len(requests)
    dtype = "bfloat16"
    kv_memory = round(scale.num_resident * mean_tokens * kv_bytes_per_token(source.config, dtype))
    return EngineConfig(
        model=demo.model,
        policy="fcfs",
        swap="none",
        dtype=dtype,
        kv_memory=kv_memory,
        max_model_len=scale.max_input + scale.max_output,
        seed=demo.seed,
    )


async def _capacity(base: EngineConfig, batch: WorkloadSpec) -> float:
    """Requests a second that this machine can sustain with a full pool.

    Time a full batch over two output lengths; the longer run less the shorter one is pure decoding.
    """
    async with _started(base, make_policy(base.policy)) as engine:
        # The first warms up; no text comes twice.
        _, short_s, long_s = [await _time_batch(engine, batch, i, n) for i, n in enumerate((1, 1, CALIBRATION_TOKENS))]
        requests = build(batch, engine.tokenizer)
    decode_s = max(1e-6, long_s - short_s) / (CALIBRATION_TOKENS - 1)
    mean_output = sum(request.max_tokens for request in requests) / len(requests)
    return len(requests) / (short_s + decode_s * mean_output)


async def _warm_up(engine: AsyncEngine, spec: WorkloadSpec) -> None:
    """A few other texts: threads, allocator and learned prices are alike for every way."""
    batch = replace(spec, num_prompts=NUM_WARM_UP)
    await _time_batch(engine, batch, 0, WARM_UP_TOKENS)


async def _time_batch(engine: AsyncEngine, spec: WorkloadSpec, number: int, num_tokens: int) -> float:
    """Seconds for the requests of ``spec`` with another seed, all at once, so many output tokens each."""
    from floodplain.engine.load_target import EngineTarget
    from floodplain.workload.client import run_load

    requests = build(replace(spec, seed=spec.seed + number + 1), engine.tokenizer)
    batch = [replace(request, arrival_s=0.0, max_tokens=num_tokens) for request in requests]
    begin = time.monotonic()
    await run_load(EngineTarget(engine), batch, progress=False)
    return time.monotonic() - begin


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {"runs": [{"name": name, **result} for name, result in runs], "machine": _machine()}


def _machine() -> dict[str, Any]:
    import torch

    from floodplain.engine.offline import hardware_report

    return {
        "processor": hardware_report("cpu").name,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _write(demo: DemoConfig, runs: list[Run]) -> None:
    from floodplain.observe.plots import save_plots
    from floodplain.observe.report import render_report
    from floodplain.observe.strict_json import save_result

    scale = _scale(demo)
    save_result(demo.out / "demo.json", _summary(runs))
    save_plots(runs, demo.out)
    words = paragraphs(scale.num_resident, scale.burst_s, scale.burst_factor)
    page = render_report(TITLE, runs, _machine(), words, {way.name: way.words for way in WAYS})
    (demo.out / "index.html").write_text(page, encoding="utf-8")
