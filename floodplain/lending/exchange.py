"""One HTTP exchange that ends by a deadline, however slowly the other end sends. Standard library only.

A socket's own timeout counts for one read: a peer that sends a byte a second would never end it. Here each read may
take what is left of the whole exchange. Resolving a host's name is up to the system, and is not bounded here.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from contextlib import suppress
from typing import Any

MAX_ANSWER_BYTES = 2**24
"""A longer answer is refused once so many bytes have arrived."""


class AnswerTooLong(Exception):
    """An answer has more than ``MAX_ANSWER_BYTES``; the connection is of no further use."""


class DeadlineConnection:
    """A connection that is kept between exchanges.

    Args:
        scheme: ``http`` or ``https``.
        host: A name or an address.
        port: None for the scheme's own.
    """

    def __init__(self, scheme: str, host: str, port: int | None) -> None:
        self._context = ssl.create_default_context() if scheme == "https" else None
        kind = http.client.HTTPConnection if self._context is None else http.client.HTTPSConnection
        self._http: Any = kind(host, port)
        self._socket: _DeadlineSocket | None = None
        self._has_hung_up = False

    @property
    def is_open(self) -> bool:
        """Whether an exchange has left the connection open."""
        return self._http.sock is not None

    def exchange(
        self, method: str, path: str, body: str | None, headers: dict[str, str | bytes], deadline_s: float
    ) -> tuple[int, bytes]:
        """Send a request; return (status, body) of the answer.

        Args:
            method: Of HTTP.
            path: The path and query.
            body: What is sent; None sends nothing.
            headers: Beside those that HTTP needs.
            deadline_s: On the clock ``time.monotonic``: everything has ended by then.

        Raises:
            OSError, http.client.HTTPException: There is no whole answer.
            AnswerTooLong: It exceeds ``MAX_ANSWER_BYTES``.
        """
        if not self.is_open:
            self._socket = self._http.sock = _dial(self._http.host, self._http.port, self._context, deadline_s)
        assert self._socket is not None
        if self._has_hung_up:  # checked once there is a socket for ``hang_up`` to find
            raise ConnectionAbortedError("it is to end")
        self._socket.deadline_s = deadline_s
        self._http.request(method, path, body, headers)
        response = self._http.getresponse()
        text = response.read(MAX_ANSWER_BYTES + 1)
        if len(text) > MAX_ANSWER_BYTES:
            raise AnswerTooLong
        if response.length:  # of a cut answer, ``read(amount)`` returns what there is
            raise http.client.IncompleteRead(text, response.length)
        if not response.isclosed():  # after exactly as much as was declared, or at the end of the last chunk
            response.read()
        return response.status, text

    def hang_up(self) -> None:
        """Abort the exchange that is under way, and fail all later ones. Callable on any thread.

        One that is resolving a host's name, or connecting, ends later.
        """
        self._has_hung_up = True
        sock = self._socket
        if sock is not None:
            sock.hang_up()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._http.close()


class _DeadlineSocket:
    """As much of a socket as ``http.client`` uses, with one deadline over all calls."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._socket, self.deadline_s = sock, deadline_s

    def sendall(self, data: bytes) -> None:
        self.allow_the_rest()
        self._socket.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self, self._socket.makefile("rb", buffering=0)))

    def allow_the_rest(self) -> None:
        """Limit the next call to the time that is left.

        Raises:
            TimeoutError: Nothing is left.
        """
        self._socket.settimeout(_left_s(self.deadline_s))

    def hang_up(self) -> None:
        """Shut the socket down: a reader gets the end of the stream, a writer an error."""
        with suppress(OSError):  # it was closed, or never connected
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS, too: its own waits for the other end

    def close(self) -> None:
        self._socket.close()


class _Reader(io.RawIOBase):
    """Reads from a socket, each in what is left of the time."""

    def __init__(self, owner: _DeadlineSocket, raw: Any) -> None:
        self._owner, self._raw = owner, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._owner.allow_the_rest()
        num_read: int | None = self._raw.readinto(buffer)
        return num_read

    def close(self) -> None:
        self._raw.close()
        super().close()


def _dial(host: str, port: int, context: ssl.SSLContext | None, deadline_s: float) -> _DeadlineSocket:
    """Return a connected socket, after the TLS handshake if there is one.

    Raises:
        OSError: No address of the host can be connected to.
    """
    failure: OSError | None = None
    for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(_left_s(deadline_s))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock.settimeout(_left_s(deadline_s))
                sock = context.wrap_socket(sock, server_hostname=host)
            return _DeadlineSocket(sock, deadline_s)
        except OSError as error:
            sock.close()
            failure = error
    raise failure or OSError(f"{host} has no address")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
