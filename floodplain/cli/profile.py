"""``floodplain profile``: measures what a model needs or can spare. Each verb is a module ``profile_VERB``."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

VERBS = ("llm", "media", "swap", "step", "show")
"""In the order of ``--help``. ``floodplain/cli/profile_NAME.py`` holds one, as ``cli.main`` describes it."""


def add_parser(verbs: Any) -> None:
    """Add every verb and its flags."""
    profiles = verbs.add_parser("profile", allow_abbrev=False).add_subparsers(metavar="|".join(VERBS))
    for verb in VERBS:
        import_module(f"floodplain.cli.profile_{verb}").add_parser(profiles)


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    status: int = import_module(f"floodplain.cli.profile_{args.verb.split()[1]}").run(args)
    return status
