"""``floodplain profile``: measures what a model needs or can spare, and shows what was measured."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floodplain.cli import profile_media
from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.engine.config import EngineConfig, check_early, check_sizes, expect_no_keys
from floodplain.files.extras import require
from floodplain.files.profile import Profile, read_profile
from floodplain.files.results import PLOT_HELP, check_picture, check_writable
from floodplain.observe.profile import describe_profile, save_and_show
from floodplain.observe.terminal import complain, say
from floodplain.profiler.flags import LlmProfileConfig, StepProfileConfig, SwapProfileConfig, check_load
from floodplain.web.client import check_server
from floodplain.workload.spec import WorkloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """The flags of ``show``. Raises UserError if the picture's name has another ending."""

    profile: Path = field(metadata={"help": "what floodplain profile --out wrote", "positional": True})
    plot: Path | None = flag(None, PLOT_HELP)

    def __post_init__(self) -> None:
        check_picture(self.plot)


def add_parser(verbs: Any) -> None:
    """Add every verb and its flags."""
    profiles = verbs.add_parser("profile", allow_abbrev=False).add_subparsers(metavar="|".join(RUN))
    engine, load = (EngineConfig, "engine flags"), (WorkloadSpec, "workload flags")
    about = "Find the highest request rate within goals, and the KV memory that it leaves idle."
    add_verb(profiles, "llm", about, LlmProfileConfig, engine, load)
    profile_media.add_parser(profiles)
    about = "Compute the swap space that bursts, cached prefixes and long contexts need."
    add_verb(profiles, "swap", about, SwapProfileConfig, engine, load)
    add_verb(profiles, "step", "Measure steps of an engine, and fit what they cost.", StepProfileConfig, engine)
    add_verb(profiles, "show", "Say what a profile holds.", ShowConfig)


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    return RUN[args.verb.split()[1]](args)


def _run_llm(args: argparse.Namespace) -> int:
    """Profile; 0, also if no rate meets the goals."""
    config, engine = dataclass_from(args, LlmProfileConfig), dataclass_from(args, EngineConfig)
    spec = dataclass_from(args, WorkloadSpec)
    config.check_engine(engine)
    expect_no_keys(engine, args.verb)
    check_load(spec)
    if config.out is not None:
        check_writable(config.out, "--out", config.steps, spec.trace)
    if config.base_url is not None:
        check_server(config.base_url)  # before the imports, which take longer
    elif config.steps is None:
        check_early(engine)
    else:
        check_sizes(engine)  # in virtual time the pool may be larger than this machine's memory

    from floodplain.profiler.llm_profile import run_profile

    save_and_show(run_profile(config, engine, spec, progress=not args.quiet), config.out, args.format)
    return 0


def _run_swap(args: argparse.Namespace) -> int:
    config, engine = dataclass_from(args, SwapProfileConfig), dataclass_from(args, EngineConfig)
    spec = dataclass_from(args, WorkloadSpec)
    config.check_engine(engine)
    expect_no_keys(engine, args.verb)
    config.check_load(spec)
    check_sizes(engine)
    if config.out is not None:
        check_writable(config.out, "--out", config.steps, config.llm_profile, spec.trace)

    from floodplain.profiler.swap_profile import run_profile

    save_and_show(run_profile(config, engine, spec, progress=not args.quiet), config.out, args.format)
    return 0


def _run_step(args: argparse.Namespace) -> int:
    config, engine = dataclass_from(args, StepProfileConfig), dataclass_from(args, EngineConfig)
    expect_no_keys(engine, args.verb)
    check_writable(config.out)
    check_early(engine)

    from tqdm import tqdm

    from floodplain.profiler.step_profile import profile_steps

    with tqdm(total=config.shapes * config.repeats, desc="steps", disable=args.quiet) as progress:
        profile = profile_steps(engine, config, progress.update)
    save_and_show(profile, config.out, args.format)
    return 0


def _show(args: argparse.Namespace) -> int:
    config = dataclass_from(args, ShowConfig)
    if config.plot is not None:
        require("--plot", "matplotlib")
        check_writable(config.plot, "--plot")

    from floodplain.observe.strict_json import to_json

    profile = read_profile(config.profile)
    if config.plot is not None:
        _draw(profile, config.profile, config.plot)
        if not args.quiet:
            complain(f"the picture is in {config.plot}")
    say(to_json(profile.to_json()) if args.format == "json" else describe_profile(profile))
    return 0


def _draw(profile: Profile, source: Path, path: Path) -> None:
    from floodplain.files.parsing import parsing
    from floodplain.observe.profile import draw_profile
    from floodplain.observe.style import save_figure

    with parsing(f"--plot: {source}", "cannot be drawn"):
        figure = draw_profile(profile)
    if figure is None:
        raise UserError(f"--plot: {source} has no tries with the numbers that are drawn for kind {profile.kind}")
    save_figure(figure, path)


RUN = {"llm": _run_llm, "media": profile_media.run, "swap": _run_swap, "step": _run_step, "show": _show}
"""Every verb, in the order of ``--help``."""
