"""``floodplain profile swap MODEL``: the swap space that bursts, cached prefixes and long contexts need."""

from __future__ import annotations

import argparse
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.profile_output import save_and_show
from floodplain.engine.config import EngineConfig
from floodplain.files.results import check_writable
from floodplain.profiler.swap_flags import SwapProfileConfig
from floodplain.workload.spec import WorkloadSpec


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    parser = add_verb(verbs, "swap", "Compute the swap space that bursts, cached prefixes and long contexts need.")
    add_dataclass_flags(parser, SwapProfileConfig)
    add_dataclass_flags(parser, EngineConfig, "engine flags")
    add_dataclass_flags(parser, WorkloadSpec, "workload flags")


def run(args: argparse.Namespace) -> int:
    """Serve the bursts in virtual time; 0."""
    config, engine = dataclass_from(args, SwapProfileConfig), dataclass_from(args, EngineConfig)
    spec = dataclass_from(args, WorkloadSpec)
    config.check_engine(engine)
    config.check_load(spec)
    if config.out is not None:
        check_writable(config.out)

    from floodplain.profiler.swap_profile import run_profile

    profile = run_profile(config, engine, spec, progress=not args.quiet)
    save_and_show(profile, config.out, args.format)
    return 0
