"""``HEAD`` is ``GET`` without a body, on every route."""

from __future__ import annotations

from starlette.types import Message, Scope, Send


def answer_head_as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Return the scope of the ``GET`` that a ``HEAD`` stands for, and a ``send`` that drops the body of the answer.

    Status and headers, ``Content-Length`` included, are those of the ``GET``. Other methods pass unchanged.
    """
    if scope["method"] != "HEAD":
        return scope, send

    async def send_without_body(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return {**scope, "method": "GET"}, send_without_body
