"""Runs an application under uvicorn until a signal or a failure."""

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

import uvicorn
from starlette.types import ASGIApp

from floodplain.core.errors import UserError
from floodplain.web.accepting import LISTEN_BACKLOG
from floodplain.web.acceptor import Acceptor
from floodplain.web.limits import ConnectionLimits
from floodplain.web.listen import url_of

TICKS_PER_SWEEP = 10
"""uvicorn ticks ten times a second; connections are checked once a second."""

SHUTDOWN_SWEEP_S = 0.1
"""Seconds between checks of connections once the server has been stopped."""


class StoppableServer(uvicorn.Server):
    """uvicorn with our signal handling, and the settings of all our services.

    Args:
        app: The application; its lifespan starts and closes what it serves.
        closing_s: Seconds in which connections may close once the server has been stopped.
        on_ready: Called once the server takes requests.
        limits: Bounds on connections.
        clock: Monotonic seconds.
    """

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
        """Serve until SIGINT or SIGTERM.

        Args:
            sock: A bound socket, not yet listening.

        Raises:
            UserError: Another process listens on the port by now.
            BaseException: ``failure``.
        """
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
        """Stop at SIGINT and SIGTERM. uvicorn's own version raises them again later, and so does not exit with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _leave_out_of_collections() -> None:
    """Exclude loaded objects from garbage collection, whose scans delay every answer by tens of milliseconds.

    A large body makes so many objects that each collection scans everything: 120,000 lists took 0.4 s, not 0.01.
    """
    gc.collect()
    gc.freeze()
