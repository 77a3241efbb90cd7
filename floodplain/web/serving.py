"""Runs an application under uvicorn until a signal or a failure, with bounded connections."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from floodplain.core.errors import UserError
from floodplain.web.accepting import LISTEN_BACKLOG, Accepting
from floodplain.web.address import url_of
from floodplain.web.connection import Connection
from floodplain.web.limits import ConnectionLimits

READ_BYTES = 2**15
"""Most bytes that are parsed before other work of the event loop runs."""


class Acceptor(Accepting[Connection]):
    """The connections of one listening socket, on the event loop; they are also uvicorn's (``state.connections``)."""

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
        """Whether fewer than ``max_connections`` are open or being opened."""
        num_opening = sum(one not in self._connections for one in self._opening)  # one may be in both for a moment
        return len(self._connections) + num_opening < self._limits.max_connections

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


TICKS_PER_SWEEP = 10
"""uvicorn ticks ten times a second; connections are checked once a second."""

SHUTDOWN_SWEEP_S = 0.1
"""Seconds between checks of connections once the server has been stopped."""


class StoppableServer(uvicorn.Server):
    """uvicorn with our signals and settings; once stopped, connections may close within ``closing_s`` seconds."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        closing_s: int,
        on_ready: Callable[[], None],
        limits: ConnectionLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_ready = on_ready
        self._limits = limits
        self._clock = clock
        self._acceptors: list[Acceptor] = []
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            interface="asgi3",
            loop="asyncio",  # not uvloop, which vLLM brings: its transports are of another class
            proxy_headers=False,  # a client's address is not used
            timeout_graceful_shutdown=closing_s,
        )
        super().__init__(config)

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """The exception that ended the service behind the server, which then stops; None while there is none."""

    def stop(self) -> None:
        """Exit once the running requests are answered. Called on the event loop; may be called again."""
        self.should_exit = True
        for connection in list(self.server_state.connections):
            connection.shutdown()  # at once: uvicorn checks ``should_exit`` ten times a second

    def serve_on(self, sock: socket.socket) -> None:
        """Serve on a bound socket until a signal. Raises UserError if the port is taken by now, or ``failure``."""
        try:
            sock.listen(LISTEN_BACKLOG)
        except OSError as error:
            raise UserError(f"cannot listen on {url_of(sock)} ({error.strerror}): choose another --port") from error
        _leave_out_of_collections()
        self.run(sockets=[sock])
        if self.failure is not None:
            raise self.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, accept connections under our limits, then call ``on_ready``."""
        await super().startup([])
        if self.should_exit or self.failure is not None:  # stopped or failed during the start: never ready
            return
        self._acceptors = [
            Acceptor(sock, self.config, self.server_state, self.lifespan.state, self._limits, self._clock)
            for sock in sockets or ()
        ]
        for acceptor in self._acceptors:
            acceptor.open()
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. True if the server is to exit."""
        if counter % TICKS_PER_SWEEP == 0:
            self.sweep()
        return await super().on_tick(counter) or self.failure is not None

    def sweep(self) -> None:
        """Close connections that exceeded a time limit. Called on the event loop."""
        for acceptor in self._acceptors:
            acceptor.sweep()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then stop as uvicorn does, which does not wait for partial requests."""
        for acceptor in self._acceptors:
            acceptor.close()
        sweeping = asyncio.create_task(self._shut_down_connections())
        try:
            await super().shutdown(sockets)
        finally:
            sweeping.cancel()

    async def _shut_down_connections(self) -> None:
        """Shut down connections repeatedly: some were being accepted at the stop, others stall later."""
        while True:
            await asyncio.sleep(SHUTDOWN_SWEEP_S)
            for connection in list(self.server_state.connections):
                connection.shutdown()
            self.sweep()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop at SIGINT, SIGTERM, and SIGHUP unless that is ignored (nohup): files in shared memory are removed.

        uvicorn's own version raises them again later, and so does not exit with 0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _leave_out_of_collections() -> None:
    """Exclude loaded objects from garbage collection: with a body of 120,000 lists it took 0.4 s, not 0.01."""
    gc.collect()
    gc.freeze()
