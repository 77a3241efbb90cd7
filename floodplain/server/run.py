"""From an engine to a process that serves: the signals, the drain."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from floodplain.core.errors import UserError
from floodplain.server.app import create_app
from floodplain.server.auth import KeyRing
from floodplain.server.protocol import ServingEngine
from floodplain.web.gate import DrainSwitch
from floodplain.web.listen import url_of

CLOSING_GRACE_S = 5
"""How long connections may take to close once nothing is computed for them any more."""

KEEP_ALIVE_S = 30
"""How long an idle connection is kept: longer than most clients', so that they close first."""


class Server(uvicorn.Server):
    """uvicorn, stopping as a model server should: first the requests drain, with a bound, then it exits.

    Args:
        engine: Not yet started.
        keys: Who may use ``/v1``; None lets everybody in.
        drain_timeout_s: After so long, what still runs is aborted.
        on_ready: Called once the server takes requests.
    """

    def __init__(
        self, engine: ServingEngine, *, keys: KeyRing | None, drain_timeout_s: float, on_ready: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._drain = DrainSwitch()
        self._drain_timeout_s = drain_timeout_s
        self._on_ready = on_ready
        self._drains: set[asyncio.Task[None]] = set()
        config = uvicorn.Config(
            create_app(engine, drain=self._drain, keys=keys),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(drain_timeout_s) + CLOSING_GRACE_S,
        )
        super().__init__(config)

    def stop(self) -> None:
        """Drain and exit; called again, abort what still runs. On the event loop."""
        timeout_s = 0.0 if self._drain.is_draining else self._drain_timeout_s
        self._drain.is_draining = True
        self._drains.add(asyncio.get_running_loop().create_task(self._engine.drain(timeout_s)))
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to exit."""
        return await super().on_tick(counter) or self._engine.failure is not None

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


def serve(
    engine: ServingEngine,
    sock: socket.socket,
    *,
    keys: KeyRing | None,
    drain_timeout_s: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve on ``sock`` until SIGINT or SIGTERM; then drain and return.

    Raises:
        UserError: Somebody else listens on the port by now.
        BaseException: What ended the engine's step loop, if that is why the server stopped.
    """
    try:
        sock.listen()
    except OSError as error:
        raise UserError(f"cannot listen on {url_of(sock)} ({error.strerror}): choose another --port") from error
    server = Server(engine, keys=keys, drain_timeout_s=drain_timeout_s, on_ready=on_ready)
    server.run(sockets=[sock])
    if engine.failure is not None:
        raise engine.failure
