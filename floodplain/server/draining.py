"""Draining of a server: running requests may finish, for a bounded time; the log shows what is awaited."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from floodplain.server.protocol import ServingEngine
from floodplain.web.gate import DrainSwitch

logger = logging.getLogger(__name__)


class Draining:
    """Ends the requests of a server that stops, and turns ``switch`` on. Everything is called on the event loop."""

    def __init__(
        self,
        engine: ServingEngine,
        switch: DrainSwitch,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._switch, self._timeout_s, self._clock = engine, switch, timeout_s, clock
        self._tasks: list[asyncio.Task[None]] = []
        self._begun_s = 0.0

    def begin(self) -> None:
        """Let running requests finish; a second call aborts those that are left."""
        is_again, self._switch.is_draining = self._switch.is_draining, True
        if not is_again:
            self._begun_s = self._clock()
        logger.info(describe_stop(self._engine.num_live, 0.0 if is_again else self._timeout_s))
        drain = self._drain(0.0 if is_again else self._timeout_s, len(self._tasks) + 1)
        self._tasks.append(asyncio.get_running_loop().create_task(drain))

    async def wait(self) -> None:
        """Return when every drain that began has ended, and its end is logged."""
        await asyncio.gather(*self._tasks)

    async def _drain(self, timeout_s: float, number: int) -> None:
        had_requests = self._engine.num_live > 0
        await self._engine.drain(timeout_s)
        if had_requests and number == len(self._tasks):  # else a later signal has cut it short, and tells the end
            logger.info(describe_end(self._engine.num_live, self._clock() - self._begun_s))


def describe_stop(num_live: int, timeout_s: float) -> str:
    """The line at a stop signal: what is awaited, how long at most, and what another signal does."""
    if not num_live:
        return "stopping: no request is live"
    if not timeout_s:
        return f"stopping at once: {_requests(num_live)} aborted"
    them = "it" if num_live == 1 else "them"
    return f"stopping: {_requests(num_live)} may finish within {timeout_s:g} s; a second signal aborts {them}"


def describe_end(num_aborted: int, span_s: float) -> str:
    """The line once no request is awaited any more."""
    if not num_aborted:
        return f"stopped after {span_s:.1f} s: all requests ended"
    return f"stopped after {span_s:.1f} s: {_requests(num_aborted)} aborted"


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"
