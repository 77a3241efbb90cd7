"""The one HTTP client: what a server sends is bounded in size and in time, and a server leads it nowhere else.

Redirects are not followed, cookies are not kept, compressed bodies are refused, and no credentials are sent but those
that the caller gives. Proxies of the environment are asked, except for this machine.
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
    """What one exchange may take.

    Attributes:
        connect_s: Seconds until a connection is open.
        total_s: Seconds from there to the last byte of the answer, connecting included.
        max_bytes: Most bytes of the answer's body.
    """

    connect_s: float = 2.0
    total_s: float = 10.0
    max_bytes: int = 2**20


USUAL = AnswerLimits()


class HttpClient:
    """Asks one server, each time over a connection of its own.

    Args:
        url: Its address.
        api_key: Sent as a bearer token; None sends none.
        name: What the user gave the address as.

    Raises:
        UserError: The address is none.
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
            NoAnswer: Another problem than the status.
            UserError: The environment names a proxy that is none.
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
        """Send a request; the context has its answer from the head on, and hangs up when it ends.

        Args:
            path: Added to the address.
            body: POSTed as JSON; None sends a GET.
            deadline_s: By then the head of the answer has come, on the clock ``time.monotonic``.
            connect_s: Seconds until a connection is open.

        Raises:
            NoServer: Nothing accepts connections.
            NoAnswer: What answers does not speak HTTP, or breaks off.
            TimeoutError: The deadline has passed.
            UserError: The environment names a proxy that is none.
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
        # A transport is all that is needed: a client of httpx adds cookies, redirects, netrc and decompression.
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
    """``HttpClient.ask`` for programs without an event loop; errors as there."""
    return asyncio.run(HttpClient(url, api_key).ask(path, body, limits))


def check_server(url: str) -> None:
    """Make sure that something accepts connections at an address, before long work for it begins.

    Raises:
        UserError: Nothing does, or the address is none.
    """
    try:
        ask_now(url, "", limits=AnswerLimits(connect_s=1.5, total_s=2.0, max_bytes=0))
    except NoServer as error:
        raise UserError(f"{error}: start one, or give its address with --base-url") from None
    except NoAnswer:
        pass  # it is there


def _has_proxies() -> bool:
    from urllib.request import getproxies

    return bool(getproxies())


@cache
def _tls(scheme: str) -> ssl.SSLContext:
    """The system's certificates; for plain HTTP none, since reading them takes a while."""
    return ssl.create_default_context() if scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
