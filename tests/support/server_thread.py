"""A server of ours on a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading

from floodplain.web.address import bind, url_of
from floodplain.web.serving import StoppableServer
from tests.support.waiting import HANG_S


class ServerThread:
    """``url`` is the server's address; ``stop`` has the effect of a signal. Subclasses set ``_server``."""

    _server: StoppableServer

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._sock = sock or bind("127.0.0.1", 0)
        self._sock.listen()
        self.url = url_of(self._sock)
        self.port = int(self.url.rsplit(":", 1)[1])
        self._is_ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._sock]))

    @property
    def thread_id(self) -> int | None:
        """The thread of the event loop."""
        return self._thread.ident

    def note_ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_ready.set()

    def start(self) -> None:
        self._thread.start()
        assert self._is_ready.wait(HANG_S)

    def stop(self) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._server.stop)

    def join(self) -> None:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
