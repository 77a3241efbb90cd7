"""Requests to coordinators over HTTP. Standard library only, for bare GPU images; one thread at a time."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from floodplain.core.codec import WireError
from floodplain.core.errors import UserError
from floodplain.leases.messages import Message
from floodplain.leases.rows import Reply
from floodplain.lending.exchange import AnswerTooLong, DeadlineConnection
from floodplain.lending.wire import (
    Answer,
    News,
    check_listing,
    decode_answer,
    decode_news,
    decode_reply,
    encode_message,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 2.0
_NONE = "what answers as coordinator is none"
_MAX_SHOWN_CHARS = 500


class CoordinatorUnreachable(Exception):
    """No coordinator answers, or none of them leads: ask again. The message has the reason of the one asked last."""


class NotACoordinator(UserError):
    """The server is no coordinator of this version: its answer has another shape."""


class CoordinatorClient:
    """Sends requests to the coordinator that leads. The connection is kept between requests.

    Args:
        urls: Of all coordinators on one store, with commas between them; the one that leads is found.
        token: Sent with every request; None sends none.
        timeout_s: Of a whole exchange with one of them.

    Raises:
        UserError: An address is invalid.
    """

    def __init__(self, urls: str, token: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._spelled = urls, token
        self._urls = [_split(url) for url in urls.split(",")]
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}".encode()  # as in the token file, not Latin-1
        self._timeout_s = timeout_s
        self._connection: DeadlineConnection | None = None
        self._has_hung_up = False

    def twin(self) -> CoordinatorClient:
        """Return another client of the same coordinators, for another thread."""
        return CoordinatorClient(*self._spelled, self._timeout_s)

    def send(self, messages: Sequence[Message]) -> Answer:
        """Send messages in one request, and return the answer.

        Raises:
            CoordinatorUnreachable: No coordinator answered; the messages may have been applied.
            UserError: The coordinator refuses: a wrong token, or a message that it does not take.
        """
        body = self._ask("POST", "/v1/messages", {"messages": [encode_message(message) for message in messages]})
        return _understood(lambda: decode_answer(body, [message.name for message in messages]))

    def wait_for_news(self, name: str, mark: str, wait_s: float) -> News:
        """Return whether there is news of a member's leases: once there is, or after ``wait_s``.

        Args:
            name: Of the member.
            mark: Of the last answer; empty the first time.
            wait_s: Seconds.

        Raises:
            CoordinatorUnreachable: No coordinator answered.
            UserError: The coordinator refuses.
        """
        query = urlencode({"member": name, "mark": mark, "wait_s": wait_s})
        body = self._ask("GET", f"/v1/changes?{query}", wait_s=wait_s)
        return _understood(lambda: decode_news(body))

    def list_leases(self) -> Mapping[str, Any]:
        """Return all members and leases that the coordinator knows, as the JSON of a ``Listing``.

        Raises:
            CoordinatorUnreachable: No coordinator answered.
            UserError: The coordinator refuses.
        """
        body = self._ask("GET", "/v1/leases")
        return _understood(lambda: check_listing(body))

    def forget(self, name: str) -> Reply:
        """Forget a device that will not come back.

        Raises:
            CoordinatorUnreachable: No coordinator answered.
            UserError: The coordinator refuses.
        """
        body = self._ask("DELETE", f"/v1/members/{quote(name, safe='')}")
        return _understood(lambda: decode_reply(body))

    def hang_up(self) -> None:
        """Abort the exchange that is under way, if there is one, and fail all later ones. Callable on any thread."""
        self._has_hung_up = True
        connection = self._connection
        if connection is not None:
            connection.hang_up()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> object:
        """Ask one coordinator after the other until one answers, beginning with the last that answered."""
        problem = ""
        for _ in range(len(self._urls)):
            try:
                status, text = self._exchange(method, path, None if body is None else json.dumps(body), wait_s)
            except AnswerTooLong:
                self.close()
                raise NotACoordinator(f"{_NONE}: {_shown(self._urls[0])} sends too much") from None
            except (OSError, http.client.HTTPException) as error:
                problem = f"{_shown(self._urls[0])} does not answer: {error or type(error).__name__}"
            else:
                if status == 200:
                    return _read(text)
                problem = f"{_shown(self._urls[0])} answers {status}: {_message_of(text)}"
                if status < 500 and status != 429:
                    raise UserError(_one_line(problem))
            self.close()
            self._urls.append(self._urls.pop(0))
        raise CoordinatorUnreachable(_one_line(problem))

    def _exchange(self, method: str, path: str, body: str | None, wait_s: float) -> tuple[int, bytes]:
        """Do one request; over a new connection if the old one turns out to have been closed in the meantime."""
        deadline_s = time.monotonic() + self._timeout_s + wait_s
        if self._connection is None:
            self._connection = DeadlineConnection(*self._urls[0])
        if self._has_hung_up:  # checked once there is a connection for ``hang_up`` to find
            raise ConnectionAbortedError("it is to end")
        was_open = self._connection.is_open
        try:
            return self._connection.exchange(method, path, body, self._headers, deadline_s)
        except (ConnectionError, http.client.BadStatusLine):
            self._connection.close()
            if not was_open:
                raise
            return self._connection.exchange(method, path, body, self._headers, deadline_s)


def _split(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as for the system's resolver
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    is_more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
    if parts.scheme not in ("http", "https") or is_more or not re.fullmatch(r"[^\s\0-\x20\x7f]+", host):
        shown = url.strip().rpartition("@")[2]
        raise UserError(f"--coordinator {shown!r} is no address: give http://HOST:PORT")
    return parts.scheme, host, port


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
    """Refuse NaN and infinities, which JSON lacks and Python's parser takes."""
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
