"""Polls how much KV of a target is in use while a try runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.observe.polling import polling

IDLE_S = 30.0
"""The most seconds before each try in which a target must become idle."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class KvUse:
    """A target's KV pool at one moment.

    Attributes:
        used_bytes: What requests hold; cached prefixes that no request holds are free.
        pool_bytes: The whole pool.
        num_live: Requests that run, wait or are swapped out.
    """

    used_bytes: int
    pool_bytes: int
    num_live: int


ReadUse = Callable[[], Awaitable[KvUse]]


@dataclass(slots=True)
class PeakUse:
    """The most that was in use at any poll."""

    used_bytes: int = 0
    pool_bytes: int = 0

    def note(self, use: KvUse) -> None:
        """Include the result of a poll."""
        self.used_bytes = max(self.used_bytes, use.used_bytes)
        self.pool_bytes = max(self.pool_bytes, use.pool_bytes)


@asynccontextmanager
async def watching(read: ReadUse, period_s: float) -> AsyncIterator[PeakUse]:
    """Poll once before the context begins, and then every ``period_s`` seconds until it ends.

    Raises:
        UserError: From ``read``, which is then not called again; the context ends with it.
    """
    peak = PeakUse()

    async def look() -> None:
        peak.note(await read())

    async with polling(look, period_s):
        yield peak


async def wait_until_idle(read: ReadUse, name: str, timeout_s: float = IDLE_S) -> None:
    """Return when no request is alive.

    Raises:
        UserError: There still is one after ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while (await read()).num_live:
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise UserError(f"{name} serves other requests: profile it while it has no other load") from None
