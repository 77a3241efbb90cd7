"""``floodplain cluster``: makes instances behind a router drop and restore layers, and migrates requests."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.router import RouterFlags, ask_router, key_to_send, told
from floodplain.core.flags import check_between, flag
from floodplain.observe.terminal import complain, say

POLL_S = 0.05
ABOUT = {
    "drop": "Let two to four instances share one copy of the layers, as a pipeline with a larger KV pool. "
    "The first one named leads.",
    "restore": "Let the instances of a group have all layers again.",
    "migrate": "Move the shortest running request of one instance, with its KV, to another one.",
}
COUNTS: Mapping[str, str | int] = {"drop": "+", "restore": 1, "migrate": 2}
"""The ``nargs`` of each verb's instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterVerbConfig(RouterFlags):
    """The flags of all three verbs. Raises UserError if a value is out of its range."""

    wait: float = flag(60.0, "seconds to wait until it is done; 0 returns at once", metavar="S")

    def __post_init__(self) -> None:
        check_between(self, "wait", 0, 3600, "seconds")
        RouterFlags.__post_init__(self)


def add_parser(verbs: Any) -> None:
    """Add the verbs and their flags."""
    changes = verbs.add_parser("cluster", allow_abbrev=False).add_subparsers(metavar="|".join(ABOUT))
    for name, about in ABOUT.items():
        parser = add_verb(changes, name, about)
        what = "an instance: its slot (0, 1, ...), or e and its epoch, as floodplain instances shows them"
        parser.add_argument("instances", nargs=COUNTS[name], metavar="INSTANCE", help=what)
        add_dataclass_flags(parser, ClusterVerbConfig)


def run(args: argparse.Namespace) -> int:
    """Send the order, and wait for a drop or restore; 1 if the router refuses or is silent, or the group fails."""
    config, verb = dataclass_from(args, ClusterVerbConfig), args.verb.split()[1]
    base_url = config.base_url.rstrip("/")
    ask = partial(ask_router, base_url, api_key=key_to_send(config.api_key_file))
    body: dict[str, Any] = {"instances": args.instances} if verb == "drop" else {"instance": args.instances[0]}
    if verb == "migrate":
        body = dict(zip(("source", "target"), args.instances, strict=True))

    def tell() -> str:
        begun = ask(f"/v1/cluster/{verb}", body)
        row = begun if verb == "migrate" else _wait(ask, begun, verb, config.wait)
        if row is None:
            return ""
        text = describe(row, verb)
        return json.dumps(row) if args.format == "json" else text

    text = told(base_url, tell)
    if text == "":
        complain("the group ended before that was done: see the router's log")
    if not text:
        return 1
    say(text)
    return 0


def describe(row: Mapping[str, Any], verb: str) -> str:
    """One line about what was done, from a ``GroupRow``; of ``migrate``, from a row with only a number."""
    if verb == "migrate":
        return f"migration {row['number']} begins: /migrations and /metrics say how it ends"
    who = f"instances {', '.join(row['names'])}"
    if verb == "restore":
        what = "have all layers again" if row["state"] == "solo" else f"restore theirs ({row['state']})"
        return f"{who} {what} after {row['seconds']:.2f} s: {row['own_blocks']} KV blocks"
    layers = " + ".join(map(str, row["layers"]))
    what = f"share the layers {layers}, {row['state']} after {row['seconds']:.2f} s"
    return f"{who} {what}: {row['own_blocks']} KV blocks became {row['blocks']}"


def _wait(ask: Callable[[str], dict[str, Any]], row: dict[str, Any], verb: str, wait_s: float) -> dict[str, Any] | None:
    """The group's row when it is done, or after ``wait_s``; None if the group ended early."""
    end_s = time.monotonic() + wait_s
    while row["state"] != "pipelined" or verb == "restore":
        if time.monotonic() >= end_s:
            return row
        time.sleep(POLL_S)
        answer = ask("/groups")
        rows = [one for one in answer["groups"] if one["number"] == row["number"]]
        if not rows:
            seconds = answer["restored"].get(str(row["number"])) if verb == "restore" else None
            return None if seconds is None else {**row, "state": "solo", "seconds": seconds}
        row = dict(rows[0])
    return row
