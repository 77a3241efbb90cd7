"""``floodplain top URL``: shows in a terminal what a server or a coordinator does now."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.cli.router import KEY_HELP, key_to_send
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.files.parsing import parsing
from floodplain.live.changes import Snapshot, whole
from floodplain.live.follow import OTHER_VERSION, KeyRefused, NoFeed, follow
from floodplain.live.screen import draw
from floodplain.observe.terminal import complain, say
from floodplain.web.address import check_base_url
from floodplain.web.bearer import read_secret
from floodplain.web.client import HttpClient, NoAnswer, NoServer

BEGIN, NEXT_LINE, END = "\033[?7l\033[H", "\033[K\n", "\033[J\033[?7h"
"""Codes that write over the last screen without flicker, and cut long lines instead of wrapping them."""
FRAME_LINES = 14
"""Lines of a screen that are not rows of requests, and some to spare."""

KEY_HINT = ": give --api-key-file FILE, or of a coordinator --coordinator-token-file FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """The flags of the verb. Raises UserError if ``url`` is no address."""

    url: str = flag("http://127.0.0.1:8000", "of a server or a coordinator", positional=True)
    api_key_file: Path | None = flag(None, KEY_HELP, metavar="FILE")
    coordinator_token_file: Path | None = flag(None, "of a coordinator: an admin's token, in a file of mode 0600")
    once: bool = flag(False, "show it once; if the output is no terminal, it is shown once in any case")

    def __post_init__(self) -> None:
        check_base_url(self.url, "URL")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "top", "Show what a server or a coordinator does, until Ctrl-C.", TopConfig)


def run(args: argparse.Namespace) -> int:
    """Show it until Ctrl-C; 1 if the service does not answer, or ends."""
    config = dataclass_from(args, TopConfig)
    url, is_screen = config.url.rstrip("/"), sys.stdout is not None and sys.stdout.isatty()
    token_file = config.coordinator_token_file
    key = read_secret(token_file, "coordinator token file") if token_file else key_to_send(config.api_key_file)
    client = HttpClient(url, key, name="URL")
    draw_it = _draw_json if args.format == "json" else _draw_screen if is_screen else _draw_plain
    try:
        asyncio.run(_watch(client, draw_it, is_once=config.once or not is_screen))
    except (NoAnswer, UserError) as error:
        complain(_describe(error, url))
        return 1
    return 0


def _describe(error: NoAnswer | UserError, url: str) -> str:
    """What is wrong, and what to change."""
    if isinstance(error, NoServer):
        return f"{error}: start one, or give its address: floodplain top URL"
    hint = KEY_HINT if isinstance(error, KeyRefused) else ""
    if isinstance(error, NoFeed) and urlsplit(url).path:
        hint = ": give its address without a path"
    return f"no live data at {url}: {error}{hint}"


async def _watch(client: HttpClient, draw_it: Callable[[Snapshot], str], *, is_once: bool) -> None:
    async with aclosing(follow(client)) as snapshots:
        async for snapshot in snapshots:
            with parsing("its live data", OTHER_VERSION):
                text = draw_it(snapshot)
            if text.startswith(BEGIN):
                print(text, end="", flush=True)
            else:
                say(text)
            if is_once:
                return


def _draw_screen(snapshot: Snapshot) -> str:
    height = max(1, shutil.get_terminal_size().lines - 1)  # the last newline would scroll a full screen
    has_colour = not os.environ.get("NO_COLOR")  # https://no-color.org
    lines = draw(snapshot, most_rows=max(3, height + 1 - FRAME_LINES), has_colour=has_colour).split("\n")
    if len(lines) > height:
        lines = [*lines[: height - 1], f"and {len(lines) - height + 1} more lines"]
    return BEGIN + "".join(f"{line}{NEXT_LINE}" for line in lines) + END


def _draw_plain(snapshot: Snapshot) -> str:
    return draw(snapshot, most_rows=1000)


def _draw_json(snapshot: Snapshot) -> str:
    return json.dumps(whole(snapshot))
