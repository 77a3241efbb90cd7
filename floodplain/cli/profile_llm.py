"""``floodplain profile llm MODEL``: the highest rate within goals, and the KV memory that a model leaves idle at it."""

from __future__ import annotations

import argparse
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.profile_output import save_and_show
from floodplain.engine.config import EngineConfig
from floodplain.engine.early_checks import check_early
from floodplain.files.results import check_writable
from floodplain.profiler.llm_flags import LlmProfileConfig, check_load
from floodplain.web.client import check_server
from floodplain.workload.spec import WorkloadSpec


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    parser = add_verb(
        verbs, "llm", "Find the highest request rate within goals, and the KV memory that it leaves idle."
    )
    add_dataclass_flags(parser, LlmProfileConfig)
    add_dataclass_flags(parser, EngineConfig, "engine flags")
    add_dataclass_flags(parser, WorkloadSpec, "workload flags")


def run(args: argparse.Namespace) -> int:
    """Profile; 0, also if no rate meets the goals."""
    config, engine = dataclass_from(args, LlmProfileConfig), dataclass_from(args, EngineConfig)
    spec = dataclass_from(args, WorkloadSpec)
    config.check_engine(engine)
    check_load(spec)
    if config.out is not None:
        check_writable(config.out)
    if config.base_url is not None:
        check_server(config.base_url)  # before the imports, which take longer
    else:
        check_early(engine)

    from floodplain.profiler.llm_profile import run_profile

    profile = run_profile(config, engine, spec, progress=not args.quiet)
    save_and_show(profile, config.out, args.format)
    return 0
