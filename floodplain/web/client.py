"""An HTTP client for servers that are not trusted: the size and time of answers are bounded.

It follows no redirects, keeps no cookies, refuses compressed bodies, and sends only credentials that the caller gives.
httpx2 uses the proxies of the environment, except for this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import parse_json
from floodplain.web.address import check_address

if TYPE_CHECKING:
    import httpx2

MAX_ERROR_BYTES, ERROR_S = 2**14, 10.0
"""Most bytes that are read of an error answer, and most seconds for reading them."""
_MAX_REASON = 300


class NoAnswer(Exception):
    """No complete answer arrived within the bounds. The message is one line."""


class NoServer(NoAnswer):
    """Nothing accepts connections at the address, which the message names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer; bytes of its body that are not UTF-8 become U+FFFD in ``text``."""

    status: int
    text: str

    def json(self) -> Any:
        """The JSON value of the body. Raises UserError as ``parse_json``."""
        return parse_json(self.text, "its answer")

    def reason(self) -> str:
        """The message of an OpenAI error body, else the body; as one line."""
        with suppress(UserError, TypeError, KeyError):
            return one_line(str(self.json()["error"]["message"]))
        return one_line(self.text)


class Exchange:
    """An answer whose body is not read yet. It closes its connection when its deadline has passed.

    ``content_type``: the body's type; empty if the answer does not state it. ``deadline_s``: when reading must end, on
    the clock ``time.monotonic``; may be changed to a later time.
    """

    def __init__(self, response: httpx2.Response, deadline_s: float) -> None:
        self.status = response.status_code
        self.content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.deadline_s = deadline_s
        self._location = response.headers.get("location", "")
        self._encoding = response.headers.get("content-encoding", "identity").strip().lower()
        self._body = response.aiter_raw()
        self._stream = response.extensions["network_stream"]
        self._is_late = False
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._look)

    async def read(self) -> bytes | None:
        """The next bytes of the body; None at its end. TimeoutError if the deadline has passed.

        NoAnswer if the body is cut off, breaks HTTP, or is compressed.
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
    import httpx2

    return (httpx2.HTTPError, httpx2.StreamError, OSError, ValueError)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Bounds of one exchange: seconds to connect, seconds to its last byte (connecting included), bytes of the body."""

    connect_s: float = 2.0
    total_s: float = 10.0
    max_bytes: int = 2**20


USUAL = AnswerLimits()


class HttpClient:
    """Sends requests to one server, each over a new connection; ``api_key`` as a bearer token, without outer spaces.

    Raises UserError, which begins with ``name``, if the address is not valid, or if no header can hold the key.
    """

    def __init__(self, url: str, api_key: str | None = None, *, name: str = "--base-url") -> None:
        check_address(name, url)
        self.url = url
        self._headers = {b"Accept": b"*/*", b"Accept-Encoding": b"identity", b"Connection": b"close"}
        self._headers |= {b"User-Agent": b"floodplain"}
        if api_key is not None:
            if not api_key.strip().isprintable():  # the library's error would show the key
                raise UserError("the API key has control characters: leave them out of OPENAI_API_KEY, or the key file")
            self._headers[b"Authorization"] = f"Bearer {api_key.strip()}".encode()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, limits: AnswerLimits = USUAL) -> Answer:
        """Send a GET, or a POST of ``body`` as JSON, and return the whole answer, whatever its status.

        NoServer if nothing accepts connections; NoAnswer for any other failure except an error status: no whole answer,
        too large, a redirect; UserError if the environment names an invalid proxy.
        """
        deadline_s = time.monotonic() + limits.total_s
        try:
            async with self.open(path, body, deadline_s, limits.connect_s) as exchange:
                if 300 <= exchange.status < 400:
                    raise NoAnswer(await exchange.problem())
                content = await exchange.read_some(limits.max_bytes)
        except TimeoutError:
            raise NoAnswer(f"no whole answer within {limits.total_s:g} s") from None
        if len(content) > limits.max_bytes:
            raise NoAnswer(f"the answer has more than {limits.max_bytes} bytes")
        return Answer(exchange.status, content.decode(errors="replace"))

    @asynccontextmanager
    async def open(
        self, path: str, body: Mapping[str, Any] | None, deadline_s: float, connect_s: float
    ) -> AsyncIterator[Exchange]:
        """Send a request; the context is the answer, its body unread, and closes the connection.

        A ``body`` is POSTed as JSON. ``deadline_s``, on the clock ``time.monotonic``, bounds the head of the answer.
        NoServer if nothing accepts connections; NoAnswer if the server's answer is not HTTP, or the connection breaks;
        TimeoutError if the deadline has passed; UserError if the environment names an invalid proxy.
        """
        import httpx2

        request = httpx2.Request(
            "GET" if body is None else "POST",
            self.url + path,
            headers=[*self._headers.items()],
            json=body,
            extensions={"timeout": {"connect": connect_s}},
        )
        may_use_proxy = not is_this_machine(request.url.host)
        async with _client(request.url.scheme, trust_env=may_use_proxy) as client:
            try:
                async with asyncio.timeout_at(deadline_s):
                    response = await client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                hint = " (asked through a proxy: see no_proxy)" if may_use_proxy and _names_proxies() else ""
                is_late = isinstance(error, httpx2.ConnectTimeout)
                why = f"no connection within {connect_s:g} s" if is_late else problem_of(error)
                raise NoServer(f"no server at {self.url}{hint}: {why}") from error
            except TimeoutError:
                raise
            except network_errors() as error:
                raise NoAnswer(problem_of(error)) from error
            async with aclosing(response):
                with closing(Exchange(response, deadline_s)) as exchange:
                    yield exchange


def ask_now(
    url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    limits: AnswerLimits = USUAL,
    *,
    api_key: str | None = None,
) -> Answer:
    """``HttpClient.ask`` for programs without an event loop; raises the same errors."""
    return asyncio.run(HttpClient(url, api_key).ask(path, body, limits))


def check_server(url: str) -> None:
    """Raise UserError if nothing accepts connections at ``url``, or it is not valid: before long work for it begins."""
    try:
        ask_now(url, "", limits=AnswerLimits(connect_s=1.5, total_s=2.0, max_bytes=0))
    except NoServer as error:
        raise UserError(f"{error}: start one, or give its address with --base-url") from None
    except NoAnswer:
        pass  # something accepts connections


def _client(scheme: str, *, trust_env: bool) -> httpx2.AsyncClient:
    """A client for one exchange: it keeps no cookie. Raises UserError for a proxy that is not supported."""
    import httpx2

    try:
        return httpx2.AsyncClient(verify=_tls(scheme), trust_env=trust_env)
    except (ValueError, ImportError) as error:
        raise UserError(f"a proxy of the environment is no HTTP proxy ({one_line(str(error))}): see no_proxy") from None


def _names_proxies() -> bool:
    from urllib.request import getproxies

    return bool(getproxies())


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine by its address or as ``localhost``; other names are not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


@cache
def _tls(scheme: str) -> ssl.SSLContext:
    """The system's certificates for HTTPS; none for plain HTTP, because reading them takes a while."""
    return ssl.create_default_context() if scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
