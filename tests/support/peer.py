"""A server that follows a script: it sends any bytes, never responds, or closes the connection."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from floodplain.web.address import bind, url_of


def answer(body: bytes, status: int = 200, headers: str = "") -> bytes:
    """Return a whole HTTP response; the connection stays open."""
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


DRIP_S = 0.01
"""Seconds between two bytes of an endless response."""
DRIP = b"\n~"
"""A response with this ending is followed by single bytes, forever."""
HANG_UP = b""
HANG_UP_AFTER = b"\n#"
"""After a response with this ending the connection is closed."""


class Peer:
    """See the module.

    Attributes:
        url: Its address.
        requests: Every request received, whole.
        num_connections: Number of connections so far.
    """

    def __init__(self, listener: socket.socket, answers: list[bytes | None]) -> None:
        self.url, self.requests, self.num_connections = url_of(listener), list[bytes](), 0
        self._listener, self._sockets = listener, list[socket.socket]()
        self._closed = threading.Event()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for each in answers:
            self._answers.put(each)
        listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                self._sockets.append(connection)
                if self._closed.is_set():  # ``close`` may not have closed it
                    connection.close()
                    return
                with suppress(OSError):
                    self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        """Respond to requests of one connection until the script closes it; after None, it sends nothing more."""
        while request := self._read(connection):
            self.requests.append(request)
            text = self._answers.get()
            if text is None:
                return
            connection.sendall(text.removesuffix(DRIP))
            while text.endswith(DRIP) and not self._closed.wait(DRIP_S):
                connection.sendall(b" ")
            if text == HANG_UP or text.endswith(HANG_UP_AFTER):
                connection.close()
                return

    def _read(self, connection: socket.socket) -> bytes:
        text = b""
        while b"\r\n\r\n" not in text:
            if not (some := connection.recv(65536)):
                return b""
            text += some
        head, _, body = text.partition(b"\r\n\r\n")
        lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")]
        while len(body) < sum(lengths):
            body += connection.recv(65536)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        for connection in [self._listener, *self._sockets]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@contextmanager
def answering(*answers: bytes | None) -> Iterator[Peer]:
    """Yield a peer that sends these responses, in this order."""
    with closing(Peer(bind("127.0.0.1", 0), list(answers))) as peer:
        yield peer
