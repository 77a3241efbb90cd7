"""``floodplain bench offline MODEL`` and ``bench serve``: replay a workload, write client measurements."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from floodplain.bench.flags import BenchConfig, ServerUnderTest
from floodplain.cli.options import add_verb, dataclass_from
from floodplain.engine.config import EngineConfig, check_early, expect_no_keys
from floodplain.files.extras import require
from floodplain.files.results import check_writable
from floodplain.observe.terminal import complain, say
from floodplain.web.client import check_server
from floodplain.workload.spec import WorkloadSpec


def add_parser(verbs: Any) -> None:
    """Add both verbs and their flags."""
    benches = verbs.add_parser("bench", allow_abbrev=False).add_subparsers(metavar="offline|serve")
    about, load = "Replay a workload against an engine in this process.", (WorkloadSpec, "workload flags")
    add_verb(benches, "offline", about, BenchConfig, (EngineConfig, "engine flags"), load)
    about = "Replay a workload against an OpenAI server, measured at the client."
    add_verb(benches, "serve", about, BenchConfig, (ServerUnderTest, "server under test"), load)


def run(args: argparse.Namespace) -> int:
    """Run one bench; 0 if every request was answered."""
    bench = dataclass_from(args, BenchConfig)
    if bench.out is not None:
        check_writable(bench.out)
        if bench.plot:
            require("--plot", "matplotlib")
            check_writable(_plots_folder(bench.out) / "ttft.svg", "--plot")
    result = _bench(args, bench)
    _report(args, bench, result)
    if result["failed"]:
        first = next(filter(None, result["errors"]), "")
        complain(f"{result['failed']} of {len(result['errors'])} requests failed; the first: {first}")
    return 1 if result["failed"] else 0


def _bench(args: argparse.Namespace, bench: BenchConfig) -> dict[str, Any]:
    spec = dataclass_from(args, WorkloadSpec)
    if args.verb == "bench offline":
        engine = dataclass_from(args, EngineConfig)
        expect_no_keys(engine, args.verb)
        check_early(engine)

        from floodplain.bench.run import bench_offline

        return bench_offline(engine, spec, bench, progress=not args.quiet)
    server = dataclass_from(args, ServerUnderTest)
    check_server(server.base_url)  # before the imports, which take longer
    from floodplain.bench.run import bench_serve
    from floodplain.server.auth import read_keys

    api_key = next(iter(read_keys(server.api_key_file))) if server.api_key_file else None
    return bench_serve(server, api_key, spec, bench, progress=not args.quiet)


def _report(args: argparse.Namespace, bench: BenchConfig, result: dict[str, Any]) -> None:
    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_table, summary_table

    try:
        if bench.out is not None:
            _save(bench, bench.out, result, quiet=args.quiet)
    finally:  # shown even if it cannot be saved
        table = format_table(*summary_table([(args.verb, result)]))
        say(to_json(result) if args.format == "json" else table)


def _save(bench: BenchConfig, out: Path, result: dict[str, Any], *, quiet: bool) -> None:
    from floodplain.observe.strict_json import save_result

    save_result(out, result)
    if bench.plot:
        from floodplain.observe.plots import save_plots

        folder = _plots_folder(out)
        save_plots([(out.stem, result)], folder)
        if not quiet:
            complain(f"pictures are in {folder}")


def _plots_folder(out: Path) -> Path:
    return out.parent / f"{out.stem}-plots"
