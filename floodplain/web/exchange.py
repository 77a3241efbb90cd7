"""The answer of an untrusted server: read within bounds, with its problems in one line."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import parse_json

if TYPE_CHECKING:
    import httpx

MAX_ERROR_BYTES, ERROR_S = 2**14, 10.0
"""Most bytes that are read of an error answer, and most seconds for reading them."""
_MAX_REASON = 300


class NoAnswer(Exception):
    """No complete answer arrived within the bounds. The message is one line."""


class NoServer(NoAnswer):
    """Nothing accepts connections at the address, which the message names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer.

    Attributes:
        status: The HTTP status.
        text: The body; bytes that are not UTF-8 become U+FFFD.
    """

    status: int
    text: str

    def json(self) -> Any:
        """The JSON value of the body.

        Raises:
            UserError: It is not JSON, is nested too deeply, or has a number that is not finite.
        """
        return parse_json(self.text, "its answer")

    def reason(self) -> str:
        """The message of an OpenAI error body, else the body; as one line."""
        with suppress(UserError, TypeError, KeyError):
            return one_line(str(self.json()["error"]["message"]))
        return one_line(self.text)


class Exchange:
    """An answer whose body is not read yet. It closes its connection when its deadline has passed.

    Args:
        response: The transport's response.
        deadline_s: As the attribute.

    Attributes:
        status: The HTTP status.
        content_type: The body's type; empty if the answer does not state it.
        deadline_s: When reading must end, on the clock ``time.monotonic``; may be changed to a later time.
    """

    def __init__(self, response: httpx.Response, deadline_s: float) -> None:
        self.status = response.status_code
        self.content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.deadline_s = deadline_s
        self._location = response.headers.get("location", "")
        self._encoding = response.headers.get("content-encoding", "identity").strip().lower()
        self._body = aiter(response.stream)  # type: ignore[arg-type]  # the transport is asynchronous
        self._stream = response.extensions["network_stream"]
        self._is_late = False
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._look)

    async def read(self) -> bytes | None:
        """The next bytes of the body; None at its end.

        Raises:
            NoAnswer: The body is cut off, breaks HTTP, or is compressed.
            TimeoutError: The deadline has passed.
        """
        if self._encoding != "identity":
            raise NoAnswer(f"the answer is compressed ({one_line(self._encoding)}), which was not asked for")
        try:
            data = await anext(self._body, None)
        except network_errors() as error:
            if self._is_late:
                raise TimeoutError from error
            raise NoAnswer(problem_of(error)) from error
        if self._is_late:
            raise TimeoutError
        return data

    async def read_some(self, max_bytes: int) -> bytes:
        """The body, or its first ``max_bytes`` and a few more if it is longer; errors as of ``read``."""
        parts, size = [], 0
        while size <= max_bytes and (part := await self.read()) is not None:
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Cancel the deadline."""
        self._timer.cancel()

    def _look(self) -> None:
        """Check the deadline. There is one timer an exchange: one a read would cost as much as the read."""
        if time.monotonic() < self.deadline_s:
            self._timer = asyncio.get_running_loop().call_at(self.deadline_s, self._look)
            return
        self._is_late = True
        with suppress(OSError):
            self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def problem(self) -> str:
        """One line that describes an answer whose status is not 200."""
        if 300 <= self.status < 400:
            where = f" to {one_line(self._location)}" if self._location else ""
            return f"HTTP {self.status}: redirects{where} are not followed; give the address that answers"
        try:
            self.deadline_s = time.monotonic() + ERROR_S
            content = await self.read_some(MAX_ERROR_BYTES)
            reason = Answer(self.status, content[:MAX_ERROR_BYTES].decode(errors="replace")).reason()
        except (NoAnswer, TimeoutError) as error:
            reason = str(error) or "the reason does not end"
        return f"HTTP {self.status}: {reason}"


def one_line(text: str) -> str:
    """A server's text as one line of bounded length."""
    return " ".join(text[: 4 * _MAX_REASON].split())[:_MAX_REASON] or "(no text)"


@cache
def network_errors() -> tuple[type[Exception], ...]:
    """The exception types of the network and the protocol."""
    import httpx

    return (httpx.HTTPError, httpx.StreamError, OSError, ValueError)


def problem_of(error: BaseException) -> str:
    """The message of the innermost error: libraries wrap the system's errors in their own."""
    inner: BaseException = error
    while (cause := inner.__cause__ or inner.__context__) is not None:
        inner = cause
        if isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
    if isinstance(inner, OSError) and inner.errno is not None and inner.errno > 0:
        return os.strerror(inner.errno)  # its own text may be asyncio's
    return one_line(str(inner) or str(error) or type(error).__name__)
