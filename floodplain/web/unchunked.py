"""Answers to clients older than HTTP/1.1, which support neither chunks nor ``100 Continue``."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """``app`` for one request: a body without ``Content-Length`` ends with the connection, which is always closed.

    uvicorn sends chunks to every version. Source: RFC 9112, 6.1 and 6.3; RFC 9110, 10.1.1.

    Args:
        app: The application that answers.
        cycle: uvicorn's cycle of the request, which has not begun.
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
