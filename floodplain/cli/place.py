"""``floodplain place CLUSTER.yaml``: assigns models to GPUs, and borrowers to lenders."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.core.flags import check_between, flag
from floodplain.files.extras import require
from floodplain.files.results import PLOT_HELP, check_picture, check_writable
from floodplain.observe.terminal import complain, say


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceConfig:
    """The flags of the verb. Raises UserError if a value is out of its range."""

    cluster: Path = field(metadata={"help": "YAML file with servers and models", "positional": True})
    out: Path | None = flag(None, "write the placement to this JSON file, for floodplain coordinator --placement")
    plot: Path | None = flag(None, PLOT_HELP)
    time_limit: float = flag(
        60.0,
        "seconds after which the best placement so far is taken, reading the file included; "
        "a first placement and the output are made in any case",
        metavar="S",
    )
    gap: float = flag(0.0, "a placement so little above the optimum, as a part of it, is good enough")

    def __post_init__(self) -> None:
        if not 0 < self.time_limit <= 86400:
            raise UserError(f"--time-limit must be above 0 and at most 86400 seconds, not {self.time_limit}")
        check_between(self, "gap", 0, 10)
        check_picture(self.plot)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "place", "Say which model should be on which GPUs.", PlaceConfig)


def run(args: argparse.Namespace) -> int:
    """Place the models; 0 if there is a placement."""
    config = dataclass_from(args, PlaceConfig)
    for name, path in (("--out", config.out), ("--plot", config.plot)):
        if path is not None:
            check_writable(path, name, config.cluster)
    require("place", "highspy")
    if config.plot is not None:
        require("--plot", "matplotlib")

    from floodplain.observe.placement import draw_placement
    from floodplain.observe.strict_json import save_result, to_json
    from floodplain.observe.style import save_figure
    from floodplain.planner.inputs import read_cluster
    from floodplain.planner.placement import describe, to_document
    from floodplain.planner.placer import place
    from floodplain.planner.solver import Deadline

    deadline = Deadline(config.time_limit)
    cluster = read_cluster(config.cluster)
    document = to_document(cluster, place(cluster, deadline.left_s, config.gap))
    try:
        if config.out is not None:
            save_result(config.out, document)
        if config.plot is not None:
            save_figure(draw_placement(document), config.plot)
            if not args.quiet:
                complain(f"the picture is in {config.plot}")
    finally:  # shown even if it cannot be saved
        say(to_json(document) if args.format == "json" else describe(document))
    return 0
