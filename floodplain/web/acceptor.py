"""Accepts connections a few at a time, keeps their number bounded, and closes those that waste their place."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from floodplain.web.connection import Connection
from floodplain.web.limits import ConnectionLimits

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 8
"""Connections that are accepted before everything else on the event loop has its turn."""

RETRY_S = 0.1
"""How long accepting pauses if there is no room, or no file is left."""

LOG_EVERY_S = 1.0
"""Least seconds between two log lines about accepting."""

READ_BYTES = 2**15
"""Most bytes that are parsed before everything else on the event loop has its turn."""


class Acceptor:
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
        self._sock = sock
        buffer = bytearray(READ_BYTES)
        self._make: Callable[[], Connection] = lambda: Connection(config, state, app_state, limits, clock, buffer)
        self._connections: set[Connection] = state.connections  # type: ignore[assignment]
        self._limits = limits
        self._clock = clock
        self._opening: dict[Connection, asyncio.Task[Any]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to accept."""
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Accept no more. Does not close the socket."""
        assert self._loop is not None
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def sweep(self) -> None:
        """Close connections whose time is over."""
        for connection in list(self._connections):
            connection.check()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            has_room = self._num_connections < self._limits.max_connections
            victim = None if has_room else self._longest_waiting()
            if victim is None and not has_room:
                self._pause(
                    f"all {self._limits.max_connections} connections are being answered: raise --max-connections"
                )
                return
            try:
                accepted, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._evict(victim or self._longest_waiting())
                reason = error.strerror or str(error)
                self._pause(f"cannot accept a connection ({reason}): raise ulimit -n, or lower --max-connections")
                return
            self._evict(victim)
            self._open_connection(accepted)

    @property
    def _num_connections(self) -> int:
        """Open ones and those that are being opened. A connection may be both for a turn of the loop."""
        return len(self._connections) + sum(one not in self._connections for one in self._opening)

    def _open_connection(self, accepted: socket.socket) -> None:
        assert self._loop is not None
        connection = self._make()
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, accepted))
        self._opening[connection] = task
        task.add_done_callback(partial(self._opened, connection))

    def _opened(self, connection: Connection, task: asyncio.Task[Any]) -> None:
        self._opening.pop(connection)

    def _longest_waiting(self) -> Connection | None:
        """The connection that has waited longest without a running request; None if all have one."""
        waiting = [(since_s, id(one), one) for one in self._connections if (since_s := one.waiting_since_s) is not None]
        return min(waiting)[2] if waiting else None

    def _evict(self, victim: Connection | None) -> None:
        if victim is not None:
            victim.transport.abort()
            self._connections.discard(victim)

    def _pause(self, reason: str) -> None:
        assert self._loop is not None
        if self._clock() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._clock()
            logger.warning("%s", reason)
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(RETRY_S, self.open)
