"""``floodplain demo``: serve a small real model under a burst, and show the queue that forms.

The pool of KV memory holds about 24 requests. The load is set by what this machine turns out to do: a stable rate below
its capacity, twice that for the burst. Everything runs in this process, from the load client to the model.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.cli.files import check_writable
from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.engine.config import EngineConfig
from floodplain.workload.spec import WorkloadSpec, build

if TYPE_CHECKING:
    from floodplain.engine.async_engine import AsyncEngine

NUM_RESIDENT = 24
"""Requests that the pool holds, each at half of its output."""
STABLE_SHARE = 0.5
"""The stable rate as a share of the measured capacity; the burst is twice as much."""
CALIBRATION_TOKENS = 32
TITLE = "Floodplain demo: what a burst does to a server whose memory is full"
PARAGRAPHS = (
    "A small language model answers a stable stream of requests. Then, for a while, twice as many arrive. The memory "
    "for their keys and values (KV) holds about 24 requests, so the others wait in line, first come, first served: "
    "this is what today's servers do.",
    "While the line lasts, a newcomer sees nothing at all, although every request that runs produces text faster than "
    "anybody reads. This is the baseline that sharing the memory in turns has to beat.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The flags of the demo."""

    out: Path = field(default=Path("demo"), metadata={"help": "folder for demo.json, pictures and index.html"})
    quick: bool = field(default=False, metadata={"help": "a shorter burst: less than a minute in all"})
    model: str = field(default="smollm2", metadata={"help": "the model that is served"})
    seed: int = field(default=0, metadata={"help": "seed of arrivals, lengths and texts"})


@dataclass(frozen=True, slots=True)
class _Timing:
    quiet_s: float
    burst_s: float
    tail_s: float


FULL, QUICK = _Timing(20.0, 30.0, 20.0), _Timing(5.0, 10.0, 3.0)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "demo", "Serve a small model under a burst and show the queue."), DemoConfig)


def run(args: argparse.Namespace) -> int:
    """Run the demo, write its files, print its table."""
    demo = dataclass_from(args, DemoConfig)
    check_writable(demo.out / "demo.json")
    result = asyncio.run(_run_policy(demo, "fcfs", progress=not args.quiet))
    runs = [("fcfs", result)]
    _write(demo.out, runs)

    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_table, summary_rows, transposed

    if args.format == "json":
        print(to_json(_summary(runs)))
    else:
        print(format_table(*transposed(*summary_rows(runs))))
        print(f"\npictures and numbers: {demo.out / 'index.html'}")
    return 1 if any(result["failed"] for _, result in runs) else 0


async def _run_policy(demo: DemoConfig, policy: str, *, progress: bool) -> dict[str, Any]:
    """Serve the burst under one policy."""
    from floodplain.engine.async_engine import AsyncEngine
    from floodplain.engine.offline import hardware_report, run_offline
    from floodplain.observe.result import benchmark_result
    from floodplain.observe.run_facts import RunInfo

    sample = _shape(WorkloadSpec(request_rate=1.0, num_prompts=200, seed=demo.seed))
    engine = AsyncEngine.from_config(_engine_config(demo, policy, sample))
    await engine.start()
    try:
        capacity = await _measure_capacity(engine, replace(sample, num_prompts=NUM_RESIDENT))
        spec = _burst(sample, STABLE_SHARE * capacity, QUICK if demo.quick else FULL)
        run = await run_offline(engine, build(spec, engine.tokenizer), progress=progress)
    finally:
        await engine.close()
    info = RunInfo(
        backend="floodplain",
        model_id=engine.model_name,
        tokenizer_id=engine.model_name,
        request_rate=spec.request_rate,
        seed=demo.seed,
        config=asdict(engine.engine.config) | asdict(spec) | {"measured_capacity": capacity},
        hardware=hardware_report(engine.engine.config.device),
    )
    return benchmark_result(run.records, info, run.report, run.timeline)


def _shape(spec: WorkloadSpec) -> WorkloadSpec:
    """Chat-like lengths, kept short so that a laptop's processor sees many requests."""
    return replace(spec, length_scale=0.6, max_input=320, max_output=256, ignore_eos=True)


def _burst(sample: WorkloadSpec, stable_rate: float, timing: _Timing) -> WorkloadSpec:
    """Quiet, twice as much, quiet again."""
    num_prompts = round(stable_rate * (timing.quiet_s + 2 * timing.burst_s + timing.tail_s))
    return replace(
        sample,
        request_rate=stable_rate,
        num_prompts=max(1, num_prompts),
        burst_factor=2.0,
        burst_start=timing.quiet_s,
        burst_duration=timing.burst_s,
    )


def _engine_config(demo: DemoConfig, policy: str, sample: WorkloadSpec) -> EngineConfig:
    """An engine whose pool holds ``NUM_RESIDENT`` requests at half of their output."""
    from floodplain.engine.build import kv_bytes_per_token
    from floodplain.engine.weights.open_model import open_model

    source = open_model(demo.model)
    requests = build(sample, source.load_tokenizer())
    mean_tokens = sum(len(r.prompt_token_ids) + r.max_tokens / 2 for r in requests) / len(requests)
    dtype = "bfloat16"
    kv_memory = round(NUM_RESIDENT * mean_tokens * kv_bytes_per_token(source.config, dtype))
    return EngineConfig(
        model=demo.model, policy=policy, dtype=dtype, kv_memory=kv_memory, max_model_len=1024, seed=demo.seed
    )


async def _measure_capacity(engine: AsyncEngine, sample: WorkloadSpec) -> float:
    """Requests a second that this machine can sustain with a full pool.

    Time a full batch over two output lengths; the longer run less the shorter one is pure decoding.
    """
    from floodplain.engine.load_target import EngineTarget
    from floodplain.workload.client import run_load

    seconds = []
    for run, num_tokens in enumerate((1, 1, CALIBRATION_TOKENS)):  # the first warms up; no text comes twice
        requests = build(replace(sample, seed=sample.seed + run + 1), engine.tokenizer)
        begin = time.monotonic()
        batch = [replace(request, arrival_s=0.0, max_tokens=num_tokens) for request in requests]
        await run_load(EngineTarget(engine), batch, progress=False)
        seconds.append(time.monotonic() - begin)
    decode_s = max(1e-6, seconds[2] - seconds[1]) / (CALIBRATION_TOKENS - 1)
    mean_output = sum(request.max_tokens for request in requests) / len(requests)
    return len(requests) / (seconds[1] + decode_s * mean_output)


def _summary(runs: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
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


def _write(folder: Path, runs: list[tuple[str, dict[str, Any]]]) -> None:
    from floodplain.observe.plots import save_plots
    from floodplain.observe.report import render_report
    from floodplain.observe.strict_json import save_result

    save_result(folder / "demo.json", _summary(runs))
    save_plots(runs, folder)
    page = render_report(TITLE, runs, _machine(), PARAGRAPHS)
    (folder / "index.html").write_text(page, encoding="utf-8")
