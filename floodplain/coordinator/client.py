"""Talks to coordinators over HTTP. Standard library only, for bare GPU images; one thread at a time."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from floodplain.coordinator.wire import check_listing, decode_reply, encode_message
from floodplain.core.errors import UserError
from floodplain.core.leases.messages import Message
from floodplain.core.leases.rows import Reply
from floodplain.web.bearer import read_secret_lines

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 2.0
_UNAVAILABLE = 503


class CoordinatorUnreachable(Exception):
    """No coordinator answers, or none of them leads: ask again. The message says why, of the one asked last."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the coordinator says to a batch of messages.

    Attributes:
        ttl_s: Seconds of silence after which it takes a member for dead.
        replies: In the order of the messages.
    """

    ttl_s: float
    replies: tuple[Reply, ...]


class CoordinatorClient:
    """See the module. The connection is kept between requests.

    Args:
        urls: Of all coordinators on one store, with commas between them; the one that leads is found.
        token: Sent with every request; None if they ask for none.
        timeout_s: Of connecting, and of every read.

    Raises:
        UserError: An address is none.
    """

    def __init__(self, urls: str, token: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._urls = [_split(url) for url in urls.split(",")]
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}".encode()  # as the token file has it, not Latin-1
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def send(self, messages: Sequence[Message]) -> Answer:
        """Say all of this at once.

        Raises:
            CoordinatorUnreachable: Nobody answered: what was said may have been heard.
            UserError: The coordinator refuses to listen: a wrong token, a message that it does not take.
        """
        body = self._ask("POST", "/v1/messages", {"messages": [encode_message(message) for message in messages]})
        answer = _understood(
            lambda: Answer(float(body["ttl_s"]), tuple(decode_reply(reply) for reply in body["replies"]))
        )
        if len(answer.replies) != len(messages):
            raise UserError(f"what answers as coordinator is none: {len(answer.replies)} answers to {len(messages)}")
        return answer

    def list_leases(self) -> Mapping[str, Any]:
        """Everything that the coordinator knows; see ``answers.Listing``.

        Raises:
            CoordinatorUnreachable: Nobody answered.
            UserError: The coordinator refuses.
        """
        body = self._ask("GET", "/v1/leases")
        _understood(lambda: check_listing(body))
        return body

    def forget(self, name: str) -> Reply:
        """Say that a device will not come back.

        Raises:
            CoordinatorUnreachable: Nobody answered.
            UserError: The coordinator refuses.
        """
        body = self._ask("DELETE", f"/v1/members/{quote(name, safe='')}")
        return _understood(lambda: decode_reply(body))

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
        """Ask one coordinator after the other, the one that answered last first."""
        problem = ""
        for _ in range(len(self._urls)):
            try:
                status, text = self._exchange(method, path, None if body is None else json.dumps(body))
            except (OSError, http.client.HTTPException) as error:
                problem = f"{_shown(self._urls[0])} does not answer: {error or type(error).__name__}"
            else:
                if status < 400:
                    return _read(text)
                problem = f"{_shown(self._urls[0])} answers {status}: {_message_of(text)}"
                if status < 500 and status != 429:
                    raise UserError(problem)
            self.close()
            self._urls.append(self._urls.pop(0))
        raise CoordinatorUnreachable(problem)

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        """One request; over a new connection if the old one turns out to have been closed between two of them."""
        was_open = self._connection is not None
        try:
            return self._exchange_once(method, path, body)
        except (ConnectionError, http.client.BadStatusLine):
            if not was_open:
                raise
            self.close()
            return self._exchange_once(method, path, body)

    def _exchange_once(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        if self._connection is None:
            scheme, host, port = self._urls[0]
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            self._connection = kind(host, port, timeout=self._timeout_s)
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def read_token(path: Path) -> str:
    """The token in a file of mode 0600: the last word of its first line, so a line of a token file will do.

    Raises:
        UserError: The file is unreadable, others may read it, or it is empty.
    """
    lines = read_secret_lines(path, "coordinator token file")
    if not lines:
        raise UserError(f"the coordinator token file {path} is empty: write the token into it")
    return lines[0][1][-1]


def _split(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the system's resolver will be asked
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
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"what answers as coordinator is none of this version: {error!r}") from error


def _read(text: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UserError("what answers as coordinator is none: it sends no JSON object")
    return body


def _message_of(text: bytes) -> str:
    try:
        return " ".join(str(json.loads(text)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no reason given"
