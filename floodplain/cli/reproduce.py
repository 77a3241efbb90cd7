"""``floodplain reproduce NAME|--all``: figures of the papers, simulated, and what becomes of their claims."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.files.extras import require
from floodplain.files.results import check_writable
from floodplain.observe.terminal import say

MOST_SEEDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceConfig:
    """The flags of the verb. UserError if they contradict each other."""

    name: str | None = field(default=None, metadata={"help": "a figure, such as aqua-13", "positional": True})
    all: bool = flag(False, "simulate all figures")
    list: bool = flag(False, "list all figures, and what they show")
    out: Path | None = flag(None, "write a page with claims and pictures into this folder", metavar="FOLDER")
    seeds: tuple[int, ...] = flag((0, 1, 2), "seeds of arrivals and lengths; results are means")

    def __post_init__(self) -> None:
        if (self.name is not None) + self.all + self.list != 1:
            raise UserError("name one figure, or give one of --all and --list: floodplain reproduce aqua-13")
        if self.list and self.out is not None:
            raise UserError("--list writes no page: leave --out out, or give --all in place of --list")
        if len(set(self.seeds)) != len(self.seeds) or len(self.seeds) > MOST_SEEDS or min(self.seeds) < 0:
            raise UserError(f"--seeds must be at most {MOST_SEEDS} different numbers from 0 on")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "reproduce", "Simulate figures of the papers, and say which claims come out.", ReproduceConfig)


def run(args: argparse.Namespace) -> int:
    """Simulate the figures; 0 whatever the verdicts."""
    from floodplain.papers.registry import FIGURES, figure_named

    config = dataclass_from(args, ReproduceConfig)
    if config.list:
        _list(args.format)
        return 0
    figures = list(FIGURES.values()) if config.name is None else [figure_named(config.name)]
    _reproduce(config, figures, args)
    return 0


def _list(kind: str) -> None:
    from floodplain.observe.strict_json import to_json
    from floodplain.papers.registry import FIGURES

    if kind == "json":
        say(to_json({name: figure.shows for name, figure in FIGURES.items()}))
    else:
        width = max(map(len, FIGURES))
        say("\n".join(f"{name:{width}}  {figure.shows}" for name, figure in FIGURES.items()))


def _reproduce(config: ReproduceConfig, figures: Any, args: argparse.Namespace) -> None:
    from floodplain.observe.strict_json import to_json
    from floodplain.papers.page import DATA, PAGE, describe, to_document, write_page
    from floodplain.papers.registry import run_figures

    if config.out is not None:
        require("--out", "matplotlib")
        for name in (PAGE, DATA):
            check_writable(config.out / name)
    findings = run_figures(figures, config.seeds, shows_progress=not args.quiet)
    try:
        if config.out is not None:
            write_page(config.out, findings, config.seeds)
    finally:  # shown even if it cannot be saved
        say(to_json(to_document(findings, config.seeds)) if args.format == "json" else describe(findings))
