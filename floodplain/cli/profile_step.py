"""``floodplain profile step MODEL``: measures the cost of an engine's steps, part by part."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.profile_output import save_and_show
from floodplain.engine.config import EngineConfig
from floodplain.engine.early_checks import check_early
from floodplain.files.results import check_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The flags of the verb beside the engine's."""

    out: Path = field(metadata={"help": "write the profile to this JSON file"})
    shapes: int = field(default=64, metadata={"help": "steps of so many sizes"})
    repeats: int = field(default=5, metadata={"help": "measure each at most so often; its median counts"})
    step_seconds: float = field(default=60.0, metadata={"help": "measure for at most so many seconds", "metavar": "S"})


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    step = add_verb(verbs, "step", "Measure steps of an engine, and fit what they cost.")
    add_dataclass_flags(step, StepConfig)
    add_dataclass_flags(step, EngineConfig, "engine flags")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write; 0."""
    config, engine = dataclass_from(args, StepConfig), dataclass_from(args, EngineConfig)
    check_writable(config.out)
    check_early(engine)

    from tqdm import tqdm

    from floodplain.profiler.step_profile import StepGrid, profile_steps

    grid = StepGrid(num_shapes=config.shapes, num_repeats=config.repeats, limit_s=config.step_seconds)
    with tqdm(total=grid.num_shapes * grid.num_repeats, desc="steps", disable=args.quiet) as progress:
        profile = profile_steps(engine, grid, progress.update)
    save_and_show(profile, config.out, args.format)
    return 0
