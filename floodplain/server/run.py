"""Serves an engine in a process, and drains it before the process exits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from floodplain.server.app import Extension, create_app
from floodplain.server.auth import KeyRing
from floodplain.server.protocol import ServingEngine
from floodplain.server.settings import PING_S
from floodplain.web.gate import DrainSwitch
from floodplain.web.limits import ConnectionLimits
from floodplain.web.serving import StoppableServer

CLOSING_GRACE_S = 2
"""Seconds in which connections may still close after the drain timeout."""


class Server(StoppableServer):
    """uvicorn with a drain: on a stop signal requests may finish within ``drain_timeout_s``, then it exits.

    The other arguments are those of ``StoppableServer`` and ``create_app``.
    """

    def __init__(
        self,
        engine: ServingEngine,
        *,
        keys: KeyRing | None,
        drain_timeout_s: float,
        on_ready: Callable[[], None],
        limits: ConnectionLimits,
        clock: Callable[[], float] = time.monotonic,
        ping_s: float = PING_S,
        extend: Extension | None = None,
    ) -> None:
        self._engine = engine
        self._drain = DrainSwitch()
        self._drain_timeout_s = drain_timeout_s
        self._drains: set[asyncio.Task[None]] = set()
        app = create_app(engine, drain=self._drain, keys=keys, ping_s=ping_s, extend=extend)
        closing_s = math.ceil(drain_timeout_s) + CLOSING_GRACE_S
        super().__init__(app, closing_s=closing_s, on_ready=on_ready, limits=limits, clock=clock)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine's step loop; None if there is none."""
        return self._engine.failure

    def stop(self) -> None:
        """Drain and exit; a second call aborts running requests. Called on the event loop."""
        timeout_s = 0.0 if self._drain.is_draining else self._drain_timeout_s
        self._drain.is_draining = True
        self._drains.add(asyncio.get_running_loop().create_task(self._engine.drain(timeout_s)))
        super().stop()
