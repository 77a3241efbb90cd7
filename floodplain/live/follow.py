"""Reads a service's feed for programs: snapshots, one for each message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from floodplain.core.errors import UserError
from floodplain.files.parsing import parse_json, parsing
from floodplain.live.changes import Snapshot, apply
from floodplain.web.client import HttpClient, NoAnswer
from floodplain.web.events import EventTooLong, SseParser

SILENCE_S = 10.0
"""Seconds without a message after which the service is not heard any more; it sends at least one a second."""
CONNECT_S = 2.0
OTHER_VERSION = "are of another version, or not Floodplain's"
MAX_MESSAGE_BYTES = 2**24
"""Of one message: a few thousand rows."""


class NoFeed(NoAnswer):
    """The address has no live data."""


class KeyRefused(NoAnswer):
    """A key is needed, and none or a wrong one was sent."""


async def follow(client: HttpClient) -> AsyncGenerator[Snapshot]:
    """The snapshots of a service, as they come; UserError if it does not send what a feed sends.

    NoAnswer if it is not reached, refuses (``KeyRefused`` if it is for the key), is silent, or ends the stream.
    """
    now = Snapshot({})
    async with aclosing(_messages(client)) as messages:
        async for message in messages:
            with parsing("its live data", OTHER_VERSION):
                now = apply(now, parse_json(message, "its live data"))
            yield now


async def _messages(client: HttpClient) -> AsyncGenerator[str]:
    try:
        async with client.open("/live", None, time.monotonic() + SILENCE_S, CONNECT_S) as exchange:
            if exchange.status == 404:
                raise NoFeed("it was started with --no-page, or is not a Floodplain service")
            if exchange.status == 401:
                raise KeyRefused("the key is missing or wrong")
            if exchange.status != 200:
                raise NoAnswer(await exchange.problem())
            parser = SseParser(MAX_MESSAGE_BYTES)
            while (data := await exchange.read()) is not None:
                exchange.deadline_s = time.monotonic() + SILENCE_S
                for message in parser.feed(data):
                    yield message
    except EventTooLong:
        raise UserError(f"its live data have a message over {MAX_MESSAGE_BYTES} bytes") from None
    except TimeoutError:
        raise NoAnswer(f"it is silent for {SILENCE_S:g} s") from None
    raise NoAnswer("it has ended the stream")
