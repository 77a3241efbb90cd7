"""A server that answers as a test says: with any bytes, never, or by hanging up."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from floodplain.web.listen import bind, url_of


def answer(body: bytes, status: int = 200, headers: str = "") -> bytes:
    """A whole HTTP answer; the connection stays open."""
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


DRIP_S = 0.01
"""Between two bytes of an answer that never ends."""
DRIP = b"\n~"
"""What an answer ends with after which a byte comes now and then, for ever."""
HANG_UP = b""
HANG_UP_AFTER = b"\n#"
"""What an answer ends with after which the connection is closed."""


class Peer:
    """See the module.

    Attributes:
        url: Where it listens.
        requests: The whole of every request that has come.
        num_connections: How often it was connected to.
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
                if self._closed.is_set():  # ``close`` may not have seen it
                    connection.close()
                    return
                with suppress(OSError):
                    self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        """Answer requests of one connection until the script says to hang up; None answers nothing more on it."""
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
    """A peer that gives these answers, in this order."""
    with closing(Peer(bind("127.0.0.1", 0), list(answers))) as peer:
        yield peer
