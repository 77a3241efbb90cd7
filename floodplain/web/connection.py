"""One HTTP connection: uvicorn's protocol, with bounds on its time, its headers and its pipeline added.

It alone uses private parts of uvicorn: ``_start_asgi_task``, ``_unset_keepalive_if_required``, attributes of a cycle.
They were tried with uvicorn 0.53.0 and 0.54.0; the answers to HTTP/1.0 clients are wrong with 0.52.0 and older.
"""

from __future__ import annotations

import asyncio
import json
import select
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from floodplain.web.errors import ApiError, error_body
from floodplain.web.limits import ConnectionLimits

ABORT_SCOPE_KEY = "floodplain.abort"
"""Key of a request's scope with a function that closes its connection at once, also while its client reads nothing."""


class Reading(Enum):
    """The part of a request that the connection expects next."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection. It reads into a ``buffer`` of fixed size, so that one read gives the parser little work."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        clock: Callable[[], float],
        buffer: bytearray,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        self._clock = clock
        self._buffer = memoryview(buffer)
        self._reading = Reading.HEAD
        self._since_s = clock()
        self._has_begun = False
        self._is_refused = False
        self._problem: tuple[int, str] | None = None
        self._num_headers = self._num_head_bytes = self._num_raw_bytes = 0
        self._num_sent_bytes, self._sent_s = 0, self._since_s

    # -- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin on a transport that counts the bytes that are sent."""
        assert isinstance(transport, asyncio.Transport)
        self._counted = _CountedTransport(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was read into the buffer."""
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parse ``data``; refuse a request that is malformed or too large."""
        if self._is_refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._num_raw_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_parsed_again:
                self._parse_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(*(self._problem or (400, "the request is not valid HTTP/1.1")))
            return
        if self._reading is not Reading.NOTHING and self._num_raw_bytes > self._limits.max_head_bytes:
            self._refuse(*self._head_problem())

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse a request anew without its ``Upgrade``, which a server may ignore. Source: RFC 9110, 7.8.

        The parser takes the ``rest`` after such a head for another protocol, and finds no body in it.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    # -- the parser's side -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins. Stops the parser if too many are pipelined."""
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise _Stop
        super().on_message_begin()
        self._turn(Reading.HEAD)
        self._has_begun = True
        self._num_headers = self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer after the body, which is not merged into the headers (RFC 9110, 6.5.1)."""
        self._num_headers += 1
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if self._reading is Reading.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete; uvicorn calls the application, or raises for a target that is none."""
        if not self._is_parsed_again:
            super().on_headers_complete()
            self._turn(Reading.BODY)

    def on_body(self, body: bytes) -> None:
        """A part of the body. Between two parts there are at most as many bytes as in a head."""
        self._num_raw_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self._is_parsed_again:
            self._turn(Reading.NOTHING)
            super().on_message_complete()

    @property
    def _is_parsed_again(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        cycle.scope[ABORT_SCOPE_KEY] = self.transport.abort  # type: ignore[literal-required]
        is_old = cycle.scope["http_version"] != "1.1"
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if is_old else app)  # type: ignore[arg-type]

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes or self._num_headers > self._limits.max_headers:
            self._problem = self._head_problem()
            raise _Stop

    def _head_problem(self) -> tuple[int, str]:
        limits = self._limits
        return 431, f"the headers are over {limits.max_head_bytes} bytes, or over {limits.max_headers}: send fewer"

    # -- the server's side -----------------------------------------------------------------------------------------

    @property
    def waiting_since_s(self) -> float | None:
        """Since when the connection waits for its client; None if it is closing, or answers a client that reads."""
        is_stalled = self._clock() - self._sent_s > self._limits.linger_s
        if self.transport is None or self.transport.is_closing() or (self._is_answering and not is_stalled):
            return None
        return self._sent_s if self._is_answering else self._since_s

    def on_response_complete(self) -> None:
        """An answer is complete: the connection is idle, or the next request of the pipeline runs."""
        if self._reading is Reading.NOTHING:
            self._since_s = self._clock()
        super().on_response_complete()

    def check(self) -> None:
        """Close the connection if its client exceeded a time limit. Called about once a second."""
        limits, now_s = self._limits, self._clock()
        if self._counted.num_waiting_bytes == 0 or self._counted.num_sent_bytes > self._num_sent_bytes:
            self._num_sent_bytes, self._sent_s = self._counted.num_sent_bytes, now_s
        if now_s - self._sent_s > limits.stalled_s:
            self.transport.abort()
        elif self._is_answering or self.transport.is_closing():
            if self._reading is not Reading.NOTHING:
                self._since_s = now_s
        elif self._is_refused:
            if now_s - self._since_s > limits.linger_s:
                self.transport.abort()
        elif now_s - self._since_s > self._reading_s:
            self._give_up()

    def shutdown(self) -> None:
        """The server stops: a partial request is refused, a complete one is answered. Called repeatedly."""
        if self._is_answering:
            super().shutdown()
        elif self._is_refused:
            self.transport.close()
        elif self._reading is Reading.BODY:
            self._refuse(503, "the server is stopping: send requests elsewhere")
        elif not self._has_unread_bytes:
            super().shutdown()

    @property
    def _reading_s(self) -> float:
        limits = self._limits
        return {Reading.NOTHING: limits.idle_s, Reading.HEAD: limits.head_s, Reading.BODY: limits.body_s}[self._reading]

    @property
    def _is_answering(self) -> bool:
        """Whether a request that is complete, or whose answer has begun, has no complete answer yet."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(self.pipeline) or cycle.response_started or not cycle.more_body

    @property
    def _has_unread_bytes(self) -> bool:
        """Whether bytes or a disconnect of the client wait: closing the connection now could lose a request."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def timeout_keep_alive_handler(self) -> None:
        """Disables uvicorn's deadline for an idle connection, which may lose a request; ``check`` has its own."""

    def _turn(self, reading: Reading) -> None:
        self._reading, self._since_s, self._num_raw_bytes = reading, self._clock(), 0

    def _give_up(self) -> None:
        if self._reading is Reading.NOTHING or not self._has_begun:
            if not self._has_unread_bytes:
                self.transport.close()
        else:
            self._refuse(408, f"the request was not there whole after {self._reading_s:g} seconds: send it again")

    def _refuse(self, status: int, message: str) -> None:
        """Read no more from this connection; send the reason if no answer is under way."""
        self._is_refused, self._since_s = True, self._clock()
        if self._is_answering and self._reading is not Reading.BODY:
            self.cycle.keep_alive = False
        elif self._is_answering or (
            self.cycle is not None and self._reading is Reading.BODY and self.cycle.response_complete
        ):
            self.transport.close()
        else:
            if self._reading is Reading.BODY:  # half a request is dropped
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.write(_refusal(status, message))
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection, which is seen only when something is read
                self.transport.abort()


class _Stop(Exception):
    """Stops the parser."""


def _refusal(status: int, message: str) -> bytes:
    body = json.dumps(error_body(ApiError(status, message))[1]).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINE[status] + head + body


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """``app`` for clients older than HTTP/1.1, which support neither chunks nor ``100 Continue``; uvicorn sends both.

    A body without ``Content-Length`` ends with the connection. Source: RFC 9112, 6.1 and 6.3; RFC 9110, 10.1.1.
    """
    cycle.keep_alive = cycle.waiting_for_100_continue = False
    has_length = False

    async def send(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)  # type: ignore[arg-type]

    async def answer(scope: Scope, receive: Receive, _: Send) -> None:
        await app(scope, receive, send)

    return answer


class _CountedTransport:
    """A ``transport`` that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_written_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def num_waiting_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def num_sent_bytes(self) -> int:
        return self._num_written_bytes - self.num_waiting_bytes

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._num_written_bytes += len(data)
        self._transport.write(data)
