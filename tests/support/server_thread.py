"""A server of ours on a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

from floodplain.web.address import bind, url_of
from floodplain.web.serving import StoppableServer
from tests.support.waiting import HANG_S


class ServerThread:
    """Runs ``server``, which is set later; ``url`` is its address, and ``stop`` has the effect of a signal."""

    server: StoppableServer
    loop: asyncio.AbstractEventLoop

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._sock = sock or bind("127.0.0.1", 0)
        self._sock.listen()
        self.url = url_of(self._sock)
        self.port = int(self.url.rsplit(":", 1)[1])
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[self._sock]))

    @property
    def thread_id(self) -> int | None:
        """The thread of the event loop."""
        return self._thread.ident

    def note_ready(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_ready.set()

    def start(self) -> None:
        self._thread.start()
        assert self._is_ready.wait(HANG_S)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def stop(self) -> None:
        if self.is_alive:
            with suppress(RuntimeError):  # it ends just now
                self.loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        self._thread.join(HANG_S)
        assert not self.is_alive
