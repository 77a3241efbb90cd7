"""Connections of an HTTP server: their number is bounded, and those that waste their place are closed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from floodplain.web.accepting import Accepting
from floodplain.web.connection import Connection
from floodplain.web.limits import ConnectionLimits

READ_BYTES = 2**15
"""Most bytes that are parsed before everything else on the event loop has its turn."""


class Acceptor(Accepting[Connection]):
    """Connections of one listening socket. Everything is called on the event loop.

    Args:
        sock: Listening.
        config: uvicorn's.
        state: uvicorn's; its connections are those of this acceptor.
        app_state: What the application's lifespan keeps.
        limits: The bounds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        config: uvicorn.Config,
        state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if_full = f"all {limits.max_connections} connections are being answered: raise --max-connections"
        if_scarce = "raise ulimit -n, or lower --max-connections"
        super().__init__(sock, if_full=if_full, if_scarce=if_scarce, clock=clock)
        buffer = bytearray(READ_BYTES)
        self._make: Callable[[], Connection] = lambda: Connection(config, state, app_state, limits, clock, buffer)
        self._connections: set[Connection] = state.connections  # type: ignore[assignment]
        self._limits = limits
        self._opening: dict[Connection, asyncio.Task[Any]] = {}

    def sweep(self) -> None:
        """Close connections whose time is over."""
        for connection in list(self._connections):
            connection.check()

    @property
    def has_room(self) -> bool:
        """See ``Accepting``."""
        return self._num_connections < self._limits.max_connections

    @property
    def _num_connections(self) -> int:
        """Open ones and those that are being opened. A connection may be both for a turn of the loop."""
        return len(self._connections) + sum(one not in self._connections for one in self._opening)

    def take(self, accepted: socket.socket) -> None:
        """See ``Accepting``."""
        assert self._loop is not None
        connection = self._make()
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, accepted))
        self._opening[connection] = task
        task.add_done_callback(partial(self._opened, connection))

    def _opened(self, connection: Connection, task: asyncio.Task[Any]) -> None:
        self._opening.pop(connection)

    def find_victim(self) -> Connection | None:
        """See ``Accepting``: one without a running request."""
        waiting = [(since_s, id(one), one) for one in self._connections if (since_s := one.waiting_since_s) is not None]
        return min(waiting)[2] if waiting else None

    def evict(self, victim: Connection) -> None:
        """See ``Accepting``."""
        victim.transport.abort()
        self._connections.discard(victim)
