"""``floodplain profile show PROFILE.json``: what a profile says, as a table."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.observe.terminal import say


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """The flags of the verb."""

    profile: Path = field(metadata={"help": "what floodplain profile --out wrote", "positional": True})


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "show", "Say what a profile holds."), ShowConfig)


def run(args: argparse.Namespace) -> int:
    """Print it; 0."""
    config = dataclass_from(args, ShowConfig)

    from floodplain.files.profile import read_profile
    from floodplain.observe.profile import describe_profile
    from floodplain.observe.strict_json import to_json

    profile = read_profile(config.profile)
    say(to_json(profile.to_json()) if args.format == "json" else describe_profile(profile))
    return 0
