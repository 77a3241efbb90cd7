"""``floodplain instances``: lists the instances behind a router, and their state."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.router import KEY_HELP, ask_router, key_to_send, told
from floodplain.core.errors import UserError
from floodplain.observe.table import format_table
from floodplain.observe.terminal import say
from floodplain.web.address import check_base_url

CLEAR = "\033[H\033[J"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesConfig:
    """The flags of the verb. Raises UserError if a value is out of its range."""

    base_url: str = field(default="http://127.0.0.1:8000", metadata={"help": "of the router", "metavar": "URL"})
    api_key_file: Path | None = field(default=None, metadata={"help": KEY_HELP, "metavar": "FILE"})
    watch: bool = field(default=False, metadata={"help": "show it again and again until Ctrl-C"})
    interval: float = field(default=1.0, metadata={"help": "seconds between two looks", "metavar": "S"})

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 3600:
            raise UserError(f"--interval must be between 0.1 and 3600 seconds, not {self.interval}")
        check_base_url(self.base_url)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "instances", "Say which instances are behind a router."), InstancesConfig)


def run(args: argparse.Namespace) -> int:
    """Show the list once, or until Ctrl-C; 1 if no router answers."""
    config = dataclass_from(args, InstancesConfig)
    key = key_to_send(config.api_key_file)
    while True:
        is_answered = _show(config.base_url.rstrip("/"), key, args.format == "json", is_watched=config.watch)
        if not config.watch:
            return 0 if is_answered else 1
        time.sleep(config.interval)


def _show(base_url: str, key: str | None, is_json: bool, *, is_watched: bool) -> bool:
    def tell() -> str:
        listing = ask_router(base_url, "/instances", api_key=key)
        table = describe(listing)  # also for JSON: fails on the answer of another service
        return json.dumps(listing) if is_json else table

    text = told(base_url, tell)
    if text is None:
        return False
    is_screen = is_watched and not is_json and sys.stdout is not None and sys.stdout.isatty()
    say(text, CLEAR if is_screen else "")
    return True


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
