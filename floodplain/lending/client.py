"""Requests to coordinators over HTTP. Standard library only, for bare GPU images; one thread at a time.

Each exchange ends by a deadline, however slowly the other end sends: a socket's own timeout counts for one read, so
each read may take what is left of the whole exchange. Resolving a host's name is up to the system, and is not bounded.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from floodplain.core.codec import WireError, from_json
from floodplain.core.errors import UserError
from floodplain.leases.messages import Message
from floodplain.leases.rows import Reply
from floodplain.lending.wire import (
    Answer,
    News,
    check_listing,
    decode_answer,
    decode_reply,
    encode_message,
)
from floodplain.web.address import split_url

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 2.0
_NONE = "what answers as coordinator is none"
_MAX_SHOWN_CHARS = 500


class CoordinatorUnreachable(Exception):
    """No coordinator answers, or none of them leads: ask again. The message has the reason of the one asked last."""


class NoCoordinator(CoordinatorUnreachable):
    """None of the addresses answers at all."""


class NotACoordinator(UserError):
    """The server is no coordinator of this version: its answer has another shape."""


class CoordinatorClient:
    """Sends requests to the coordinator that leads. The connection is kept between requests.

    ``urls`` are of all coordinators on one store, with commas between them; UserError if one is invalid. ``timeout_s``
    is that of a whole exchange with one of them.

    Every request raises CoordinatorUnreachable if no coordinator answered (the messages may have been applied), and
    UserError if the coordinator refuses: a wrong token, or a message that it does not take.
    """

    def __init__(self, urls: str, token: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._spelled = urls, token
        self._urls = [_split(url) for url in urls.split(",")]
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}".encode()  # as in the token file, not Latin-1
        self._timeout_s = timeout_s
        self._http: Any = None  # a connection of http.client, whose socket is the next one
        self._socket: _DeadlineSocket | None = None
        self._has_hung_up = False

    def twin(self) -> CoordinatorClient:
        """Return another client of the same coordinators, for another thread."""
        return CoordinatorClient(*self._spelled, self._timeout_s)

    def send(self, messages: Sequence[Message]) -> Answer:
        """Send messages in one request, and return the answer."""
        body = self._ask("POST", "/v1/messages", {"messages": [encode_message(message) for message in messages]})
        return _understood(lambda: decode_answer(body, [message.name for message in messages]))

    def wait_for_news(self, name: str, mark: str, wait_s: float) -> News:
        """Return whether there is news of a member's leases: once there is, or after ``wait_s`` seconds.

        ``mark`` is that of the last answer; empty the first time.
        """
        query = urlencode({"member": name, "mark": mark, "wait_s": wait_s})
        body = self._ask("GET", f"/v1/changes?{query}", wait_s=wait_s)
        return _understood(lambda: from_json(News, body, "the news", is_open=True))

    def list_leases(self) -> Mapping[str, Any]:
        """Return all members and leases of the coordinator, as the JSON of a ``Listing``."""
        body = self._ask("GET", "/v1/leases")
        return _understood(lambda: check_listing(body))

    def forget(self, name: str) -> Reply:
        """Forget a device that will not come back."""
        body = self._ask("DELETE", f"/v1/members/{quote(name, safe='')}")
        return _understood(lambda: decode_reply(body))

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
        if self._http is not None:
            self._http.close()
            self._http = None

    def _ask(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> object:
        """Ask one coordinator after the other until one answers, beginning with the last that answered."""
        problem, has_answered = "", False
        for _ in range(len(self._urls)):
            try:
                status, text = self._exchange(method, path, None if body is None else json.dumps(body), wait_s)
            except AnswerTooLong:
                self.close()
                raise NotACoordinator(f"{_NONE}: {_shown(self._urls[0])} sends too much") from None
            except (OSError, http.client.HTTPException) as error:
                reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
                problem = f"{_shown(self._urls[0])} does not answer: {reason}"
            else:
                has_answered = True
                if status == 200:
                    return _read(text)
                problem = f"{_shown(self._urls[0])} answers {status}: {_message_of(text)}"
                if status == 404 and method != "DELETE":  # a coordinator has all of these paths, but for names with /
                    raise NotACoordinator(_one_line(f"{_NONE}: {problem}"))
                if status < 500 and status != 429:
                    raise UserError(_one_line(problem))
            self.close()
            self._urls.append(self._urls.pop(0))
        raise (CoordinatorUnreachable if has_answered else NoCoordinator)(_one_line(problem))

    def _exchange(self, method: str, path: str, body: str | None, wait_s: float) -> tuple[int, bytes]:
        """Over a new connection if the old one turns out to have been closed in the meantime."""
        deadline_s, was_open = time.monotonic() + self._timeout_s + wait_s, self._is_open
        try:
            return self._converse(method, path, body, deadline_s)
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if not was_open:
                raise
            return self._converse(method, path, body, deadline_s)

    @property
    def _is_open(self) -> bool:
        return self._http is not None and self._http.sock is not None

    def _converse(self, method: str, path: str, body: str | None, deadline_s: float) -> tuple[int, bytes]:
        """Send a request; return (status, body) of the answer, by ``deadline_s`` on the clock ``time.monotonic``.

        OSError or http.client.HTTPException without a whole answer; AnswerTooLong above ``MAX_ANSWER_BYTES``.
        """
        if not self._is_open and not self._has_hung_up:
            self._connect(deadline_s)
        if self._socket is None or self._has_hung_up:  # checked once there is a socket for ``hang_up`` to find
            raise ConnectionAbortedError("it is to end")
        self._socket.deadline_s, self._socket.num_left_bytes = deadline_s, 2 * MAX_ANSWER_BYTES
        self._http.request(method, path, body, self._headers)
        response = self._http.getresponse()
        return response.status, _read_body(response)

    def _connect(self, deadline_s: float) -> None:
        scheme, host, port = self._urls[0]
        context = ssl.create_default_context() if scheme == "https" else None
        kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
        self._http = kind(host, port or kind.default_port)  # without a port, a part of ::1 would be one
        self._socket = self._http.sock = _dial(self._http.host, self._http.port, context, deadline_s)


_NO_PATH = (("", "", ""), ("/", "", ""))


def _split(url: str) -> tuple[str, str, int | None]:
    parts = split_url(url.strip())
    if parts is None or parts.username is not None or (parts.path, parts.query, parts.fragment) not in _NO_PATH:
        shown = url.strip().rpartition("@")[2]
        raise UserError(f"--coordinator {shown!r} is no address: give http://HOST:PORT")
    return parts.scheme, parts.hostname or "", parts.port


def _shown(url: tuple[str, str, int | None]) -> str:
    scheme, host, port = url
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}" + ("" if port is None else f":{port}")


def _understood(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except WireError as error:
        raise NotACoordinator(f"{_NONE} of this version: {error}") from error


def _read(text: bytes) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise NotACoordinator(f"{_NONE}: it sends no JSON") from None


def _refuse_constant(name: str) -> object:
    """NaN and infinities, which JSON lacks and Python's parser takes."""
    raise ValueError(name)


def _message_of(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no reason given"


def _one_line(text: str) -> str:
    """Return a remote text as one printable line, cut for a terminal."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line[:_MAX_SHOWN_CHARS])


MAX_ANSWER_BYTES = 2**24
"""A longer answer is refused once so many bytes of it have arrived, or twice as many with its head and sizes."""


class AnswerTooLong(Exception):
    """An answer has more than ``MAX_ANSWER_BYTES``; the connection is of no further use."""


def _read_body(response: http.client.HTTPResponse) -> bytes:
    try:
        text = response.read(MAX_ANSWER_BYTES + 1)
    except ValueError as error:  # http.client takes a negative size of a chunk
        raise http.client.HTTPException(str(error)) from error
    if len(text) > MAX_ANSWER_BYTES:
        raise AnswerTooLong
    if response.length:  # of a cut answer, ``read(amount)`` returns what there is
        raise http.client.IncompleteRead(text, response.length)
    if not response.isclosed():  # after exactly as much as was declared, or at the end of the last chunk
        response.read()
    return text


class _DeadlineSocket:
    """As much of a socket as ``http.client`` uses, with one deadline, and one bound of bytes read, over all calls."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._socket, self.deadline_s, self.num_left_bytes = sock, deadline_s, 0

    def sendall(self, data: bytes) -> None:
        self.allow_the_rest()
        self._socket.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self, self._socket.makefile("rb", buffering=0)))

    def allow_the_rest(self) -> None:
        """Limit the next call to the time that is left; TimeoutError if nothing is."""
        self._socket.settimeout(_left_s(self.deadline_s))

    def hang_up(self) -> None:
        """Shut the socket down: a reader gets the end of the stream, a writer an error."""
        with suppress(OSError):  # it was closed, or never connected
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS, too: its own waits for the other end

    def close(self) -> None:
        self._socket.close()


class _Reader(io.RawIOBase):
    def __init__(self, owner: _DeadlineSocket, raw: Any) -> None:
        self._owner, self._raw = owner, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._owner.allow_the_rest()
        num_read: int = self._raw.readinto(buffer)
        self._owner.num_left_bytes -= num_read
        if self._owner.num_left_bytes < 0:
            raise AnswerTooLong
        return num_read

    def close(self) -> None:
        self._raw.close()
        super().close()


def _dial(host: str, port: int, context: ssl.SSLContext | None, deadline_s: float) -> _DeadlineSocket:
    """Return a connected socket, after the TLS handshake if there is one; OSError if no address can be connected to."""
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
