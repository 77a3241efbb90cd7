"""Who may join: the first frame of a connection, and the token in it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping

from floodplain.cluster.frames import MAX_HELLO_BYTES, FrameLink
from floodplain.cluster.messages import Hello, read_instance_message
from floodplain.lending.fields import WireError

HELLO_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
"""Connections that have not shown a token yet; more are hung up on."""


class Door:
    """Reads hellos.

    Args:
        tokens: Secrets that let an instance in, each with its slot, or None for one that was started elsewhere.
    """

    def __init__(self, tokens: Mapping[str, int | None]) -> None:
        self._tokens = dict(tokens)
        self._num_strangers = 0

    async def read_hello(self, link: FrameLink) -> Hello | None:
        """What the other end says first; None if it is too late, or one of too many.

        Raises:
            WireError: It says something else.
        """
        if self._num_strangers >= MAX_STRANGERS:
            link.abort()
            return None
        self._num_strangers += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await link.read(MAX_HELLO_BYTES)
        except TimeoutError:
            return None
        finally:
            self._num_strangers -= 1
        if frame is None:
            return None
        hello = read_instance_message(frame[0])
        if not isinstance(hello, Hello):
            raise WireError("it did not say who it is")
        return hello

    def find_slots(self, shown: str) -> list[int | None]:
        """The slot of a token, as the only item; an empty list if nothing is let in by it."""
        return [slot for token, slot in self._tokens.items() if _is_equal(token, shown)]


def _is_equal(secret: str, shown: str) -> bool:
    return hmac.compare_digest(secret.encode(), shown.encode(errors="replace"))
