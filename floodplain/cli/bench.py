"""``floodplain bench offline MODEL`` and ``floodplain bench serve``: replay a workload, write what the clients saw."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.cli.files import check_writable, writing
from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.output import complain, say
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.workload.spec import WorkloadSpec, build
from floodplain.workload.traces import Trace, load_trace

if TYPE_CHECKING:
    from floodplain.engine.offline import OfflineRun
    from floodplain.workload.records import LoadRequest, LoadTarget, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What both benches can be told beside engine and workload."""

    out: Path | None = field(default=None, metadata={"help": "write the result to this JSON file"})
    plot: bool = field(default=False, metadata={"help": "draw pictures beside the result (needs --out)"})
    save_tokens: bool = field(default=False, metadata={"help": "keep the output token ids in the result"})
    max_concurrency: int | None = field(
        default=None, metadata={"help": "send at most so many at a time (the load is then no longer open-loop)"}
    )

    def __post_init__(self) -> None:
        if self.plot and self.out is None:
            raise UserError("--plot draws beside the result: give --out FILE too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """Any OpenAI server."""

    base_url: str = field(default="http://127.0.0.1:8000", metadata={"help": "where the server is"})
    model: str = field(metadata={"help": "the name under which it serves the model"})
    tokenizer: str | None = field(
        default=None, metadata={"help": "model whose tokenizer makes the prompts (default: the one of --model)"}
    )
    api_key_file: Path | None = field(default=None, metadata={"help": "file with the key to send"})


def add_parser(verbs: Any) -> None:
    """Add both verbs and their flags."""
    benches = verbs.add_parser("bench", allow_abbrev=False).add_subparsers(metavar="offline|serve")
    offline = add_verb(benches, "offline", "Replay a workload against an engine in this process.")
    add_dataclass_flags(offline, BenchConfig)
    add_dataclass_flags(offline, EngineConfig, "engine flags")
    add_dataclass_flags(offline, WorkloadSpec, "workload flags")
    serve = add_verb(benches, "serve", "Replay a workload against an OpenAI server, measured at the client.")
    add_dataclass_flags(serve, BenchConfig)
    add_dataclass_flags(serve, ServerUnderTest, "server under test")
    add_dataclass_flags(serve, WorkloadSpec, "workload flags")


def run(args: argparse.Namespace) -> int:
    """Run one bench; 0 if every request was answered."""
    bench = dataclass_from(args, BenchConfig)
    if bench.out is not None:
        check_writable(bench.out)
    result = _bench_offline(args) if args.verb == "bench offline" else _bench_serve(args)
    _report(args, bench, result)
    return 1 if result["failed"] else 0


def _bench_offline(args: argparse.Namespace) -> dict[str, Any]:
    config, spec = dataclass_from(args, EngineConfig), dataclass_from(args, WorkloadSpec)
    bench, trace = dataclass_from(args, BenchConfig), read_trace(spec)
    if config.fair_by == "key":
        raise UserError("--fair-by key needs clients with keys, and bench offline has none: use serve --api-key-file")

    from floodplain.engine.async_engine import AsyncEngine
    from floodplain.engine.load_target import EngineTarget
    from floodplain.engine.offline import hardware_report, run_offline
    from floodplain.observe.result import benchmark_result
    from floodplain.observe.run_facts import RunInfo

    # The load waits in line, not at the door: nothing is refused for the length of the queue.
    engine = AsyncEngine.from_config(replace(config, max_waiting=sys.maxsize))

    async def replay() -> tuple[tuple[str, ...], OfflineRun]:
        await engine.start()
        try:
            requests = build(spec, engine.tokenizer, trace)
            goals = await _goals(spec, EngineTarget(engine), requests, args)
            run = await run_offline(engine, requests, progress=not args.quiet, max_concurrency=bench.max_concurrency)
            return goals, run
        finally:
            await engine.close()

    goals, run = asyncio.run(replay())
    info = RunInfo(
        backend="floodplain",
        model_id=engine.model_name,
        tokenizer_id=engine.model_name,
        config=asdict(engine.engine.config) | _workload(spec),
        hardware=hardware_report(config.device, engine.engine.links),
        goodput=goals,
        **_asked(spec, bench, trace),
    )
    return benchmark_result(run.records, info, run.report, run.timeline, save_tokens=bench.save_tokens)


def _bench_serve(args: argparse.Namespace) -> dict[str, Any]:
    server, spec = dataclass_from(args, ServerUnderTest), dataclass_from(args, WorkloadSpec)
    bench, trace = dataclass_from(args, BenchConfig), read_trace(spec)

    from floodplain.model.weights.open_model import open_model
    from floodplain.observe.result import benchmark_result
    from floodplain.observe.run_facts import RunInfo
    from floodplain.observe.timeline import client_timeline
    from floodplain.server.auth import read_keys
    from floodplain.workload.client import run_load
    from floodplain.workload.http_target import HttpTarget

    api_key = next(iter(read_keys(server.api_key_file))) if server.api_key_file else None
    tokenizer_name = server.tokenizer or server.model
    try:
        tokenizer = open_model(tokenizer_name).load_tokenizer()
    except UserError as error:
        raise UserError(f"{error} (prompts need a tokenizer: name one with --tokenizer MODEL)") from None
    requests = build(spec, tokenizer, trace)

    async def replay() -> tuple[tuple[str, ...], list[RequestRecord]]:
        async with HttpTarget(server.base_url, server.model, api_key=api_key) as target:
            goals = await _goals(spec, target, requests, args)
            return goals, await run_load(
                target, requests, progress=not args.quiet, max_concurrency=bench.max_concurrency
            )

    goals, records = asyncio.run(replay())
    info = RunInfo(
        backend="openai",
        model_id=server.model,
        tokenizer_id=tokenizer_name,
        config=asdict(server) | _workload(spec),
        goodput=goals,
        **_asked(spec, bench, trace),
    )
    return benchmark_result(records, info, timeline=client_timeline(records), save_tokens=bench.save_tokens)


def read_trace(spec: WorkloadSpec) -> Trace | None:
    """Read the trace of the flags, if any; one line on stderr says which of its rows will be missing from the load.

    Before the model is opened, so that a bad file is refused at once.
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
    spec: WorkloadSpec, target: LoadTarget, requests: Sequence[LoadRequest], args: argparse.Namespace
) -> tuple[str, ...]:
    """The limits of a good request: as asked, or measured before the load; one line on stderr says which."""
    from floodplain.workload.goals import describe_goals, measure_goals

    goals = spec.goodput or await measure_goals(target, requests)
    if not args.quiet:
        print(f"floodplain: {describe_goals(goals, is_measured=not spec.goodput)}", file=sys.stderr)
    return goals


def _workload(spec: WorkloadSpec) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(spec).items()}


def _asked(spec: WorkloadSpec, bench: BenchConfig, trace: Trace | None) -> dict[str, Any]:
    return {
        "request_rate": None if spec.trace else spec.request_rate,
        "burstiness": spec.burstiness,
        "max_concurrency": bench.max_concurrency,
        "seed": spec.seed,
        "skipped_rows": None if trace is None else trace.num_skipped,
    }


def _report(args: argparse.Namespace, bench: BenchConfig, result: dict[str, Any]) -> None:
    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_table, summary_rows, transposed

    try:
        if bench.out is not None:
            _save(bench, bench.out, result)
    finally:  # what cannot be saved is shown all the same
        table = format_table(*transposed(*summary_rows([(args.verb, result)])))
        say(to_json(result) if args.format == "json" else table)


def _save(bench: BenchConfig, out: Path, result: dict[str, Any]) -> None:
    from floodplain.observe.strict_json import save_result

    with writing(out):
        save_result(out, result)
    if bench.plot:
        from floodplain.observe.plots import save_plots

        folder = out.parent / f"{out.stem}-plots"
        with writing(folder):
            save_plots([(out.stem, result)], folder)
