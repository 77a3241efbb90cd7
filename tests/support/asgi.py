"""Calls an ASGI application without a server."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message

Headers = list[tuple[bytes, bytes]]


def call(app: Any, path: str = "/", *, method: str = "GET", headers: Headers | None = None, body: bytes = b"") -> Any:
    """The messages of the answer to one request, whose body comes at once."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers or []}
    asyncio.run(app(scope, receive, send))
    return sent
