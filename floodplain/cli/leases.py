"""``floodplain leases``: lists lenders, borrowers and leases, with their age and recalls."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.coordinator.settings import DEFAULT_URL
from floodplain.core.errors import UserError
from floodplain.core.flags import check_between, flag
from floodplain.core.sizes import show_size
from floodplain.leases.states import LeaseState
from floodplain.lending.client import CoordinatorClient, CoordinatorUnreachable, NoCoordinator
from floodplain.observe.table import format_table
from floodplain.observe.terminal import complain, say, say_again
from floodplain.web.bearer import read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesConfig:
    """The flags of the verb. Raises UserError if a value is out of its range."""

    coordinator: str = flag(DEFAULT_URL, "its address; of several, all with commas between", metavar="URL")
    coordinator_token_file: Path | None = flag(None, "an admin's token, in a file of mode 0600")
    watch: bool = flag(False, "show it again and again until Ctrl-C")
    interval: float = flag(1.0, "seconds between two looks", metavar="S")
    forget: str | None = flag(
        None, "say that this device will not come back: what is lent on it is lost", metavar="DEVICE"
    )

    def __post_init__(self) -> None:
        check_between(self, "interval", 0.1, 3600, "seconds")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "leases", "Say who lends what to whom.", LeasesConfig)


def run(args: argparse.Namespace) -> int:
    """Show the list once, or until Ctrl-C; 1 if no coordinator answers."""
    config = dataclass_from(args, LeasesConfig)
    token = (
        read_secret(config.coordinator_token_file, "coordinator token file") if config.coordinator_token_file else None
    )
    with closing(CoordinatorClient(config.coordinator, token)) as client:
        if config.forget is not None:
            return _forget(client, config.forget)
        look = partial(_look, client, is_json=args.format == "json")
        return say_again(look, config.interval if config.watch else None, clears=args.format != "json")


def _look(client: CoordinatorClient, *, is_json: bool) -> str | None:
    try:
        listing = client.list_leases()
    except CoordinatorUnreachable as error:
        complain(_describe_silence(error))
        return None
    return json.dumps(listing) if is_json else describe(listing, time.time())


def _forget(client: CoordinatorClient, name: str) -> int:
    try:
        reply = client.forget(name)
    except CoordinatorUnreachable as error:
        complain(_describe_silence(error))
        return 1
    if reply.member is None:
        raise UserError(f"--forget {name}: {reply.detail}")
    num_lost = sum(lease.state is LeaseState.LOST for lease in reply.leases)
    say(f"{name} is forgotten; leases lost: {num_lost}, recalled: {len(reply.leases) - num_lost}")
    return 0


def _describe_silence(error: CoordinatorUnreachable) -> str:
    hint = ": start one, or give its address with --coordinator" if isinstance(error, NoCoordinator) else ""
    return f"{error}{hint}"


def describe(listing: Mapping[str, Any], unix_s: float) -> str:
    """A table of members, and one of leases, from a ``lending.wire.Listing`` as JSON."""
    borrowed: Counter[str] = Counter()
    for row in listing["leases"]:
        borrowed[row["consumer"]] += row["num_bytes"]
    members = [
        [
            row["name"],
            "alive" if row["is_living"] else "ended",
            show_size(row["offered_bytes"]),
            show_size(row["leased_bytes"]),
            show_size(borrowed[row["name"]]),
        ]
        for row in listing["members"]
    ]
    leases = [
        [
            row["lease_id"],
            row["producer"],
            row["consumer"],
            show_size(row["num_bytes"]),
            _age(unix_s - row["granted_unix_s"]),
            _state(row),
        ]
        for row in listing["leases"]
    ]
    tables = [format_table(["device", "member", "offered", "leased", "borrowed"], members)] if members else []
    tables += [format_table(["lease", "from", "to", "size", "since", "state"], leases)] if leases else []
    return "\n\n".join(tables) or "no member has joined"


def _state(row: Mapping[str, Any]) -> str:
    if row["due_in_s"] is None:
        return str(row["state"])
    left_s = row["due_in_s"]
    return f"recalled, {left_s:.0f} s left" if left_s >= 0 else f"recalled, {-left_s:.0f} s late"


def _age(seconds: float) -> str:
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
