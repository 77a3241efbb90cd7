"""One kept HTTP connection with as little work per request as can be, so that the client measures the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Connection(asyncio.Protocol):
    """One request at a time. Made by ``connect``."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._answered: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """(status, body) of the answer."""
        assert self._transport is not None and self._answered is None
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}"
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + b"\r\n\r\n" + content)
        try:
            return await self._answered
        finally:
            self._answered = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the loop: the answer is whole when as much as its Content-Length has come."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) >= length and self._answered is not None and not self._answered.done():
            self._received = b""
            self._answered.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the coordinator hung up"))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


async def connect(port: int) -> Connection:
    """A connection to a coordinator on this machine."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection
