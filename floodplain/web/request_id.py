"""The client's name of a request, which is echoed so that logs of both sides can be joined."""

from __future__ import annotations

import re

from starlette.types import Message, Scope, Send

HEADER = b"x-request-id"
REQUEST_ID = r"^[!-~]{1,256}$"
"""Printable ASCII without spaces."""


def is_request_id(name: str) -> bool:
    """Whether a client may use this name for a request."""
    return re.fullmatch(REQUEST_ID[1:-1], name) is not None


def echo_request_id(scope: Scope, send: Send) -> Send:
    """A ``send`` that adds the request's ``X-Request-Id`` to the answer, if it has a valid one."""
    name = dict(scope["headers"]).get(HEADER, b"")
    if not is_request_id(name.decode("latin-1")):
        return send

    async def send_with_name(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (HEADER, name)]}
        await send(message)

    return send_with_name
