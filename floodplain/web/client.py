"""An HTTP client for servers that are not trusted: the size and time of answers are bounded.

Redirects are not followed, cookies are not kept, compressed bodies are refused, and the only credentials sent are those
that the caller gives. Proxies of the environment are used, except for this machine.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from functools import cache
from typing import Any

from floodplain.core.errors import UserError
from floodplain.web.address import check_address, proxy_of
from floodplain.web.exchange import Answer, Exchange, NoAnswer, NoServer, network_errors, problem_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Bounds of one exchange.

    Attributes:
        connect_s: Seconds until a connection is open.
        total_s: Seconds to the last byte of the answer, connecting included.
        max_bytes: Most bytes of the answer's body.
    """

    connect_s: float = 2.0
    total_s: float = 10.0
    max_bytes: int = 2**20


USUAL = AnswerLimits()


class HttpClient:
    """Sends requests to one server, each over a new connection.

    Args:
        url: The server's address.
        api_key: Sent as a bearer token; None sends none.
        name: Name of the address in errors, such as the flag that sets it.

    Raises:
        UserError: The address is not valid.
    """

    def __init__(self, url: str, api_key: str | None = None, *, name: str = "--base-url") -> None:
        check_address(name, url)
        self.url = url
        self._headers = {b"Accept": b"*/*", b"Accept-Encoding": b"identity", b"Connection": b"close"}
        self._headers |= {b"User-Agent": b"floodplain"}
        if api_key is not None:
            self._headers[b"Authorization"] = f"Bearer {api_key}".encode()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, limits: AnswerLimits = USUAL) -> Answer:
        """Send a GET, or a POST of ``body`` as JSON, and return the whole answer, whatever its status.

        Raises:
            NoServer: Nothing accepts connections.
            NoAnswer: Any other failure except an error status: no whole answer, too large, a redirect.
            UserError: The environment names an invalid proxy.
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
        """Send a request. The context value is the answer, its body unread; leaving it closes the connection.

        Args:
            path: Added to the address.
            body: POSTed as JSON; None sends a GET.
            deadline_s: When the head of the answer must have arrived, on the clock ``time.monotonic``.
            connect_s: Seconds until a connection is open.

        Raises:
            NoServer: Nothing accepts connections.
            NoAnswer: The server does not speak HTTP, or the connection breaks.
            TimeoutError: The deadline has passed.
            UserError: The environment names an invalid proxy.
        """
        import httpx

        request = httpx.Request(
            "GET" if body is None else "POST",
            self.url + path,
            headers=[*self._headers.items()],
            json=body,
            extensions={"timeout": {"connect": connect_s}},
        )
        async with asyncio.timeout_at(deadline_s):
            proxy = await asyncio.to_thread(proxy_of, self.url) if _has_proxies() else None
        # Only a transport: a client of httpx would add cookies, redirects, netrc and decompression.
        async with httpx.AsyncHTTPTransport(verify=_tls(request.url.scheme), trust_env=False, proxy=proxy) as transport:
            try:
                async with asyncio.timeout_at(deadline_s):
                    response = await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                where = self.url if proxy is None else f"{self.url} (asked through a proxy: see no_proxy)"
                is_late = isinstance(error, httpx.ConnectTimeout)
                why = f"no connection within {connect_s:g} s" if is_late else problem_of(error)
                raise NoServer(f"no server at {where}: {why}") from error
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
    """Check that something accepts connections at an address, before long work for it begins.

    Raises:
        UserError: Nothing does, or the address is not valid.
    """
    try:
        ask_now(url, "", limits=AnswerLimits(connect_s=1.5, total_s=2.0, max_bytes=0))
    except NoServer as error:
        raise UserError(f"{error}: start one, or give its address with --base-url") from None
    except NoAnswer:
        pass  # something accepts connections


def _has_proxies() -> bool:
    from urllib.request import getproxies

    return bool(getproxies())


@cache
def _tls(scheme: str) -> ssl.SSLContext:
    """The system's certificates for HTTPS; none for plain HTTP, because reading them takes a while."""
    return ssl.create_default_context() if scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
