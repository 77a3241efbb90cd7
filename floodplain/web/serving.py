"""A process that serves an application: uvicorn, stopped by signals, ended by a failure."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from floodplain.core.errors import UserError
from floodplain.web.listen import url_of

KEEP_ALIVE_S = 30
"""How long an idle connection is kept: longer than most clients', so that they close first."""


class StoppableServer(uvicorn.Server):
    """uvicorn with our signals, and settings that every service of ours has.

    Args:
        app: What is served; its lifespan starts and closes what lies behind.
        closing_s: How long connections may take to close once the server has been stopped.
        on_ready: Called once the server takes requests.
    """

    def __init__(self, app: ASGIApp, *, closing_s: int, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=closing_s,
        )
        super().__init__(config)

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """What ended the service behind the server, which then stops; None while all is well."""

    def stop(self) -> None:
        """Exit when the requests that run have their answers. On the event loop; may be called again."""
        self.should_exit = True

    def serve_on(self, sock: socket.socket) -> None:
        """Serve until SIGINT or SIGTERM.

        Args:
            sock: Bound, not yet listening.

        Raises:
            UserError: Somebody else listens on the port by now.
            BaseException: ``failure``.
        """
        try:
            sock.listen()
        except OSError as error:
            raise UserError(f"cannot listen on {url_of(sock)} ({error.strerror}): choose another --port") from error
        self.run(sockets=[sock])
        if self.failure is not None:
            raise self.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to exit."""
        return await super().on_tick(counter) or self.failure is not None

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop at SIGINT and SIGTERM. uvicorn's own version raises them again afterwards: the exit status is not 0."""
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
