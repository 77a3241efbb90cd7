"""``floodplain coordinator``: keeps the leases of memory that engines lend each other."""

from __future__ import annotations

import argparse
import json
import signal
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.coordinator.settings import CoordinatorConfig
from floodplain.files.extras import require
from floodplain.observe.terminal import announce


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "coordinator", "Keep leases of memory until SIGINT or SIGTERM.", CoordinatorConfig)


def run(args: argparse.Namespace) -> int:
    """Run the coordinator; returns when a signal has stopped it."""
    config = dataclass_from(args, CoordinatorConfig)
    require("coordinator", "sqlalchemy", "alembic")
    if config.placement is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ignored until it serves; then the signal rereads the file

    from floodplain.coordinator.run import coordinate

    def say_ready(url: str, store_url: str) -> None:
        is_json = args.format == "json"
        text = json.dumps({"url": url, "store": store_url})
        announce(text if is_json else f"leases in {store_url} are kept at {url}")

    coordinate(config, say_ready)
    return 0
