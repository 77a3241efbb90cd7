"""One benchmark: makes the load, finds its goals, replays it, and returns the result for JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from floodplain.bench.engine_target import EngineTarget, started
from floodplain.bench.flags import BenchConfig, ServerUnderTest
from floodplain.bench.offline import OfflineRun, hardware_report, run_offline
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.model.weights.open_model import open_model
from floodplain.observe.result import RunInfo, benchmark_result
from floodplain.observe.terminal import complain
from floodplain.observe.timeline import client_timeline
from floodplain.workload.client import run_load
from floodplain.workload.goals import describe_goals, measure_goals
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptForm
from floodplain.workload.records import LoadRequest, LoadTarget, RequestRecord
from floodplain.workload.spec import WorkloadSpec, build
from floodplain.workload.traces import Trace, load_trace


def bench_offline(config: EngineConfig, spec: WorkloadSpec, bench: BenchConfig, *, progress: bool) -> dict[str, Any]:
    """Replay a workload against an engine in this process. Raises UserError if a flag or a file is bad."""
    trace = read_trace(spec)
    # All requests queue in the engine: none is refused because the queue is full.
    engine = AsyncEngine.from_config(replace(config, max_waiting=sys.maxsize))

    async def replay() -> tuple[tuple[str, ...], OfflineRun]:
        async with started(engine):
            requests = build(spec, engine.tokenizer, trace)
            goals = await _goals(spec, EngineTarget(engine), requests, progress=progress)
            run = await run_offline(engine, requests, progress=progress, max_concurrency=bench.max_concurrency)
            return goals, run

    goals, run = asyncio.run(replay())
    info = RunInfo(
        backend="floodplain",
        model_id=engine.model_name,
        tokenizer_id=engine.model_name,
        config=asdict(engine.engine.config) | asdict(spec),
        hardware=hardware_report(config.device, engine.engine.links),
        goodput=goals,
        **_asked(spec, bench, trace),
    )
    return benchmark_result(run.records, info, run.report, run.timeline, save_tokens=bench.save_tokens)


def bench_serve(
    server: ServerUnderTest, api_key: str | None, spec: WorkloadSpec, bench: BenchConfig, *, progress: bool
) -> dict[str, Any]:
    """Replay a workload against an OpenAI server, measured at the client. UserError if a flag or a file is bad."""
    trace = read_trace(spec)
    tokenizer_name = server.tokenizer or server.model
    try:
        tokenizer = open_model(tokenizer_name).load_tokenizer()
    except UserError as error:
        raise UserError(f"{error} (prompts need a tokenizer: name one with --tokenizer MODEL)") from None
    requests = build(spec, tokenizer, trace)
    form = PromptForm(server.send, tokenizer.decode)

    async def replay() -> tuple[tuple[str, ...], list[RequestRecord]]:
        target = HttpTarget(
            server.base_url,
            server.model,
            api_key=api_key,
            prompts=form,
            timeout_s=server.timeout,
            token_ids=bench.save_tokens,
        )
        goals = await _goals(spec, target, requests, progress=progress)
        return goals, await run_load(target, requests, progress=progress, max_concurrency=bench.max_concurrency)

    goals, records = asyncio.run(replay())
    info = RunInfo(
        backend="openai",
        model_id=server.model,
        tokenizer_id=tokenizer_name,
        config=asdict(server) | asdict(spec),
        goodput=goals,
        **_asked(spec, bench, trace),
    )
    return benchmark_result(records, info, timeline=client_timeline(records), save_tokens=bench.save_tokens)


def read_trace(spec: WorkloadSpec) -> Trace | None:
    """The trace of the flags; None if there is none. One line on stderr has the number of skipped rows.

    Call it before the model is opened, so that a bad file is refused at once.
    """
    if spec.trace is None:
        return None
    trace = load_trace(spec.trace)
    if trace.num_skipped:
        num_rows = len(trace.rows) + trace.num_skipped
        complain(
            f"{trace.num_skipped} of {num_rows} rows of {spec.trace} are skipped: they record no prompt or "
            "no output token, as failed requests do (to replay them, give both at least 1 token in the file)"
        )
    return trace


async def _goals(
    spec: WorkloadSpec, target: LoadTarget, requests: Sequence[LoadRequest], *, progress: bool
) -> tuple[str, ...]:
    """The goals of the flags, else goals measured before the load. One line on stderr shows them, unless quiet."""
    goals = spec.goodput or await measure_goals(target, requests, progress=progress)
    if progress:
        complain(describe_goals(goals, is_measured=not spec.goodput))
    return goals


def _asked(spec: WorkloadSpec, bench: BenchConfig, trace: Trace | None) -> dict[str, Any]:
    return {
        "request_rate": None if spec.trace else spec.request_rate,
        "burstiness": spec.burstiness,
        "max_concurrency": bench.max_concurrency,
        "seed": spec.seed,
        "skipped_rows": None if trace is None else trace.num_skipped,
    }
