"""``floodplain demo``: serve bursts in three ways with a small real model, then lend memory between two servers.

First part: the pool of KV memory holds about 24 requests (``--quick``: 12 shorter ones), on a slow machine fewer. The
load depends on this machine's capacity, measured once. All ways serve the same requests alternately
(``demo.alternation``), in this process, while the load of others is measured (``demo.other_load``). Second part:
``demo.leases``. With ``--expansion`` or ``--cluster`` there is another, single part.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.files.extras import require
from floodplain.files.results import check_writable

if TYPE_CHECKING:
    from floodplain.demo.alternation import Run
    from floodplain.demo.burst import Scale
    from floodplain.demo.other_load import LoadMeter

STABLE_SHARE = 0.5
"""The stable rate as a share of the measured capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The flags of the demo."""

    out: Path = flag(Path("demo"), "folder for demo.json, pictures and index.html")
    quick: bool = flag(False, "shorter bursts: less than 90 seconds in all on two idle cores")
    expansion: bool = flag(False, "instead: the same bursts in a part of the memory, with layers that stream")
    cluster: bool = flag(False, "instead: a spike over two instances, which drop layers and restore them")
    model: str = flag("smollm2", "the model that is served")
    seed: int = flag(0, "seed of arrivals, lengths and texts")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "demo", "Serve bursts in three ways, then lend memory between two servers.", DemoConfig)


def run(args: argparse.Namespace) -> int:
    """Run the demo, write its files, print its table."""
    demo = dataclass_from(args, DemoConfig)
    if demo.cluster and demo.expansion:
        raise UserError("--cluster does not go with --expansion: each is a demo of its own")
    require("demo", "matplotlib")
    for name in ("demo.json", "index.html"):
        check_writable(demo.out / name)
    if demo.cluster:
        return _run_cluster(demo, args)

    from floodplain.demo.burst import engine_config, sample_spec
    from floodplain.demo.leases import FULL_SCENE, QUICK_SCENE, serve_scene
    from floodplain.demo.other_load import LoadMeter
    from floodplain.demo.page import print_summary, write_files

    meter = LoadMeter()
    scale, runs = asyncio.run(_serve_ways(demo, meter, progress=not args.quiet))
    leases = None
    try:
        if not demo.expansion:
            full = _scale(demo)
            sample = sample_spec(demo.seed, full)
            base, scene = engine_config(demo.model, sample, full), QUICK_SCENE if demo.quick else FULL_SCENE
            with meter.part("leases"):
                leases = serve_scene(base, sample, scene, full.num_resident, progress=not args.quiet)
    finally:  # keep the first part's results, which took minutes
        summary = write_files(demo.out, scale, runs, leases, meter.summary(), expands=demo.expansion)
    print_summary(demo.out, summary, as_json=args.format == "json")
    return 1 if any(result["failed"] for _, result in runs) or (leases or {}).get("failed") else 0


def _run_cluster(demo: DemoConfig, args: argparse.Namespace) -> int:
    from floodplain.demo.other_load import LoadMeter
    from floodplain.demo.page import print_cluster_summary, write_cluster_files
    from floodplain.demo.relief import FULL_RELIEF, QUICK_RELIEF, runs_of, serve_relief

    scale = QUICK_RELIEF if demo.quick else FULL_RELIEF
    meter = LoadMeter()
    with meter.part("cluster"):
        records, cluster = serve_relief(demo.model, demo.seed, scale, progress=not args.quiet)
    runs = runs_of(records, demo.model, demo.seed, scale)
    summary = write_cluster_files(demo.out, runs, cluster, meter.summary())
    print_cluster_summary(demo.out, summary, as_json=args.format == "json")
    return 1 if cluster["failed"] else 0


async def _serve_ways(demo: DemoConfig, meter: LoadMeter, *, progress: bool) -> tuple[Scale, list[Run]]:
    from floodplain.demo.alternation import repeated, serve_alternately
    from floodplain.demo.burst import burst, check_part, engine_config, fit_pool, measure_machine, sample_spec
    from floodplain.demo.ways import WAYS, expansion_ways
    from floodplain.workload.goals import describe_goals

    scale = _scale(demo)
    sample = sample_spec(demo.seed, scale)
    base = engine_config(demo.model, sample, scale)
    if demo.expansion:
        check_part(base, scale)
    with meter.part("calibration"):
        capacity, goals = await measure_machine(base, replace(sample, num_prompts=scale.num_resident))
    if progress:
        print(describe_goals(goals, is_measured=True), file=sys.stderr)
    spec = replace(burst(sample, STABLE_SHARE * capacity, scale), goodput=goals)
    if not demo.expansion:  # whose pool is a part of this one
        scale = fit_pool(scale, spec.num_prompts or 0)
        base = engine_config(demo.model, sample, scale)
    ways, loads = expansion_ways(scale.pool_part) if demo.expansion else WAYS, repeated(spec, scale.num_repeats)
    facts = {"measured_capacity": capacity}
    return scale, await serve_alternately(ways, base, loads, facts, meter, progress=progress)


def _scale(demo: DemoConfig) -> Scale:
    from floodplain.demo.burst import FULL, QUICK

    return QUICK if demo.quick else FULL
