"""A server in this process that answers with any bytes, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and its connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def json(self) -> Any:
        return json.loads(self.body)

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def wait_gone(self) -> None:
        """Return when the client closes the connection."""
        while await self.reader.read(2**16):
            pass


Handler = Callable[[Asked], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: int, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d x" % status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def streaming(*parts: bytes, end: bytes = LAST_CHUNK) -> Handler:
    """Send each part as a chunk of its own."""

    async def handle(asked: Asked) -> None:
        await asked.say(STREAM_HEAD, *map(chunk, parts), end)

    return handle


def saying(*parts: bytes) -> Handler:
    """Send exactly these bytes, then close the connection."""

    async def handle(asked: Asked) -> None:
        await asked.say(*parts)

    return handle


def pouring(head: bytes, piece: bytes) -> Handler:
    """Send a piece repeatedly, as long as the client reads."""

    async def handle(asked: Asked) -> None:
        await asked.say(head)
        while not asked.writer.is_closing():
            await asked.say(piece)

    return handle


@asynccontextmanager
async def serving(handle: Handler, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Yield the address of a server; its connections end with the context."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handle(await _read(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client, or the test, has ended
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, 0)
    try:
        address = server.sockets[0].getsockname()
        yield f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, body, reader, writer)
