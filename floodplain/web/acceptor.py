"""Connections of an HTTP server: their number is bounded, and idle or slow ones are closed."""

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
"""Most bytes that are parsed before other work of the event loop runs."""


class Acceptor(Accepting[Connection]):
    """The connections of one listening socket. Everything is called on the event loop.

    Args:
        sock: A listening socket.
        config: uvicorn's configuration.
        state: uvicorn's state; its connections are those of this acceptor.
        app_state: The state of the application's lifespan.
        limits: Bounds on connections.
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
        """Close connections that have exceeded a time limit."""
        for connection in list(self._connections):
            connection.check()

    @property
    def has_room(self) -> bool:
        """Whether fewer than ``max_connections`` are open."""
        return self._num_connections < self._limits.max_connections

    @property
    def _num_connections(self) -> int:
        """Connections that are open or being opened. One may be in both sets for one iteration of the event loop."""
        return len(self._connections) + sum(one not in self._connections for one in self._opening)

    def take(self, accepted: socket.socket) -> None:
        """Open an accepted connection in a new task."""
        assert self._loop is not None
        connection = self._make()
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, accepted))
        self._opening[connection] = task
        task.add_done_callback(partial(self._opened, connection, accepted))

    def _opened(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[Any]) -> None:
        self._opening.pop(connection)
        if task.cancelled():
            accepted.close()  # before its first step the task had not taken it

    def find_victim(self) -> Connection | None:
        """The connection that has waited longest for its client; None if none waits."""
        waiting = [(since_s, id(one), one) for one in self._connections if (since_s := one.waiting_since_s) is not None]
        return min(waiting)[2] if waiting else None

    def evict(self, victim: Connection) -> None:
        """Abort a connection."""
        victim.transport.abort()
        self._connections.discard(victim)
