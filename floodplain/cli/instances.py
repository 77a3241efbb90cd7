"""``floodplain instances``: which instances are behind a front, and how they are."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.observe.table import format_table
from floodplain.observe.terminal import complain, say

CLEAR = "\033[H\033[J"
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesConfig:
    """The flags of the verb.

    Raises:
        UserError: A value is out of its range.
    """

    base_url: str = field(default="http://127.0.0.1:8000", metadata={"help": "of the front", "metavar": "URL"})
    watch: bool = field(default=False, metadata={"help": "show it again and again until Ctrl-C"})
    interval: float = field(default=1.0, metadata={"help": "seconds between two looks", "metavar": "S"})

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 3600:
            raise UserError(f"--interval must be between 0.1 and 3600 seconds, not {self.interval}")
        if urlsplit(self.base_url).scheme not in ("http", "https"):
            raise UserError(f"--base-url {self.base_url!r} is no address: give http://HOST:PORT")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "instances", "Say which instances are behind a front."), InstancesConfig)


def run(args: argparse.Namespace) -> int:
    """Look once, or until Ctrl-C; 1 if no front answers."""
    config = dataclass_from(args, InstancesConfig)
    while True:
        is_answered = _show(config.base_url, args.format == "json", is_watched=config.watch)
        if not config.watch:
            return 0 if is_answered else 1
        time.sleep(config.interval)


def _show(base_url: str, is_json: bool, *, is_watched: bool) -> bool:
    try:
        listing = _ask(f"{base_url.rstrip('/')}/instances")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        is_other = isinstance(error, urllib.error.HTTPError) and error.code == 404
        why = "it serves one engine, not --instances" if is_other else str(error) or type(error).__name__
        complain(f"no front answers at {base_url}: {why}")
        return False
    text = json.dumps(listing) if is_json else describe(listing)
    is_screen = is_watched and not is_json and sys.stdout is not None and sys.stdout.isatty()
    say(text, CLEAR if is_screen else "")
    return True


def _ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        listing = json.loads(answer.read(MAX_ANSWER_BYTES))
    describe(listing)  # raises if it is another service's answer
    return dict(listing)


def describe(listing: Mapping[str, Any]) -> str:
    """A table of instances, and a line of what became of others.

    Args:
        listing: See ``cluster.listing.Listing``.
    """
    rows = [
        [
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
    names = ["instance", "host", "pid", "stage", "state", "since", "requests", "blocks", "tokens"]
    table = format_table(names, rows) if rows else "no instance is there"
    ends = ", ".join(f"{why} {number}" for why, number in sorted(listing["ends"].items())) or "none"
    waiting = listing["without_instance"]
    return f"{table}\n\nended: {ends}; requests moved: {listing['moved_requests']}, without an instance: {waiting}"
