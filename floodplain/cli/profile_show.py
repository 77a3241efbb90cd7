"""``floodplain profile show PROFILE.json``: shows a profile as a table, and with ``--plot`` as a picture."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.files.results import check_writable
from floodplain.observe.terminal import say

if TYPE_CHECKING:
    from floodplain.files.profile import Profile

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """The flags of the verb.

    Raises:
        UserError: The picture's name has another ending.
    """

    profile: Path = field(metadata={"help": "what floodplain profile --out wrote", "positional": True})
    plot: Path | None = field(default=None, metadata={"help": f"draw it into this file ({', '.join(PICTURES)})"})

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix not in PICTURES:
            raise UserError(f"--plot {self.plot} must end in one of {', '.join(PICTURES)}")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "show", "Say what a profile holds."), ShowConfig)


def run(args: argparse.Namespace) -> int:
    """Print and draw the profile; 0."""
    config = dataclass_from(args, ShowConfig)
    if config.plot is not None:
        check_writable(config.plot, "--plot")

    from floodplain.files.profile import read_profile
    from floodplain.observe.profile import describe_profile
    from floodplain.observe.strict_json import to_json

    profile = read_profile(config.profile)
    if config.plot is not None:
        _draw(profile, config.profile, config.plot)
    say(to_json(profile.to_json()) if args.format == "json" else describe_profile(profile))
    return 0


def _draw(profile: Profile, source: Path, path: Path) -> None:
    from floodplain.files.parsing import parsing
    from floodplain.observe.profile_plot import draw_profile
    from floodplain.observe.style import save_figure

    with parsing(f"--plot: {source}", "cannot be drawn"):
        figure = draw_profile(profile)
    if figure is None:
        raise UserError(f"--plot: {source} has no tries with the numbers that are drawn for kind {profile.kind}")
    save_figure(figure, path)
