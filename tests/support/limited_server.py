"""A small service under connection limits, on a thread, with a clock that only a test advances."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive, Scope, Send

from floodplain.web.connection import ABORT_SCOPE_KEY
from floodplain.web.limits import ConnectionLimits
from floodplain.web.serving import StoppableServer
from tests.support.server_thread import ServerThread
from tests.support.waiting import HANG_S, wait_until

LIMITS = ConnectionLimits(
    max_connections=32,
    head_s=10.0,
    body_s=60.0,
    idle_s=30.0,
    stalled_s=20.0,
    linger_s=2.0,
    max_head_bytes=2000,
    max_headers=20,
    max_pipelined=4,
)


class Clock:
    """Seconds that only a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LimitedServer(StoppableServer):
    """Responds with the length of the body.

    ``/hold`` responds when ``release`` is set, ``/deaf`` does not even read before that, ``/early`` responds without,
    ``/flood`` sends 64 MiB, and ``/abort`` does too, but closes the connection when ``release`` is set.
    """

    failure = None

    def __init__(self, limits: ConnectionLimits = LIMITS, sock: socket.socket | None = None) -> None:
        self.clock = Clock()
        self.paths: list[str] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.release = asyncio.Event()
        self.thread = ServerThread(sock)
        self.port = self.thread.port
        on_ready = self.thread.note_ready
        super().__init__(self._answer, closing_s=2 * HANG_S, on_ready=on_ready, limits=limits, clock=self.clock)
        self.thread.server = self

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the server's event loop, with the callbacks that it schedules."""
        done, loop = threading.Event(), self.thread.loop
        loop.call_soon_threadsafe(lambda: (function(), loop.call_soon(done.set)))
        assert done.wait(HANG_S)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, and check the connections."""
        self.clock.now_s += seconds
        self.call(self.sweep)

    def connect(self, sent: bytes = b"") -> socket.socket:
        """Return a client's connection on which bytes have been sent."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)
        client.sendall(sent)
        return client

    def settle(self, num_connections: int) -> None:
        """Return once this many connections are open."""
        seen: list[int] = []

        def is_settled() -> bool:
            self.call(lambda: seen.append(len(self.server_state.connections)))
            return seen[-1] == num_connections

        wait_until(is_settled)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        self.paths.append(scope["path"])
        if scope["path"] == "/deaf":
            await self.release.wait()
        num_bytes, has_more = 0, True
        while has_more and scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes, has_more = num_bytes + len(message["body"]), message["more_body"]
        self.headers = scope["headers"]
        if scope["path"] == "/hold":
            await self.release.wait()
        if scope["path"] == "/abort":
            releasing = asyncio.ensure_future(self.release.wait())
            releasing.add_done_callback(lambda _: scope[ABORT_SCOPE_KEY]())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000 if scope["path"] in ("/flood", "/abort") else 0):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        await send({"type": "http.response.body", "body": b"%d" % num_bytes, "more_body": False})


@contextmanager
def limited(limits: ConnectionLimits = LIMITS, sock: socket.socket | None = None) -> Iterator[LimitedServer]:
    """Yield a server; it has ended when the context is left."""
    server = LimitedServer(limits, sock)
    server.thread.start()
    try:
        yield server
    finally:
        if server.thread.is_alive:
            server.call(server.release.set)
        server.thread.stop()
        server.thread.join()


def read_all(client: socket.socket) -> bytes:
    """The last 10,000 bytes until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while chunk := client.recv(2**20):
            data = (data + chunk)[-10_000:]
    return data


def read_answer(client: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        chunk = client.recv(2**16)
        assert chunk, data
        data += chunk
    return data
