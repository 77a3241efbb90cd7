"""``floodplain instances``: lists the instances behind a router, and their state."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.cli.router import RouterFlags, ask_router, key_to_send, told
from floodplain.core.flags import check_between, flag
from floodplain.observe.table import format_table
from floodplain.observe.terminal import say_again


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesConfig(RouterFlags):
    """The flags of the verb. Raises UserError if a value is out of its range."""

    watch: bool = flag(False, "show it again and again until Ctrl-C")
    interval: float = flag(1.0, "seconds between two looks", metavar="S")

    def __post_init__(self) -> None:
        check_between(self, "interval", 0.1, 3600, "seconds")
        RouterFlags.__post_init__(self)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "instances", "Say which instances are behind a router.", InstancesConfig)


def run(args: argparse.Namespace) -> int:
    """Show the list once, or until Ctrl-C; 1 if no router answers."""
    config = dataclass_from(args, InstancesConfig)
    key = key_to_send(config.api_key_file)
    base_url, is_json = config.base_url.rstrip("/"), args.format == "json"

    def tell() -> str:
        listing = ask_router(base_url, "/instances", api_key=key)
        table = describe(listing)  # also for JSON: fails on the answer of another service
        return json.dumps(listing) if is_json else table

    return say_again(lambda: told(base_url, tell), config.interval if config.watch else None, clears=not is_json)


def describe(listing: Mapping[str, Any]) -> str:
    """A table of instances, and a line with counts of ended instances, moved and waiting requests."""
    rows = [
        [
            f"e{row['epoch']}" if row["slot"] is None else str(row["slot"]),
            str(row["epoch"]),
            row["host"],
            str(row["pid"]),
            "-" if row["stage"] is None else str(row["stage"]),
            row["state"],
            f"{row['age_s']:.0f} s",
            str(row["requests"]),
            f"{row['used_blocks']}/{row['blocks']}",
            str(row["generated_tokens"]),
        ]
        for row in listing["instances"]
    ]
    names = ["instance", "epoch", "host", "pid", "stage", "state", "since", "requests", "blocks", "tokens"]
    table = format_table(names, rows) if rows else "no instance is there"
    ends = ", ".join(f"{why} {number}" for why, number in sorted(listing["ends"].items())) or "none"
    waiting = listing["without_instance"]
    return f"{table}\n\nended: {ends}; requests moved: {listing['moved_requests']}, without an instance: {waiting}"
