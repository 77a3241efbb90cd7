"""``POST /v1/messages`` without a framework around it: nearly all that a coordinator is asked comes this way.

FastAPI documents it like the others (``app.py``), and took half of the processor's time for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pydantic_core
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from floodplain.coordinator.requests import MessageBatch
from floodplain.coordinator.tokens import ANYBODY, Caller
from floodplain.core.errors import UserError
from floodplain.web.errors import ApiError, error_response
from floodplain.web.gate import CLIENT_SCOPE_KEY

PATH = "/v1/messages"


class MessageRoute:
    """ASGI middleware that answers batches of messages itself.

    Args:
        app: Gets everything else.
        answer: To a batch, from whoever sends it.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[MessageBatch, Caller], Awaitable[Response]]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            batch = _parse(await _read(receive))
            response = await self._answer(batch, scope.get(CLIENT_SCOPE_KEY, ANYBODY))
        except ClientDisconnect:
            return
        except HTTPException as error:
            response = error_response(error, error.headers)
        except (UserError, RequestValidationError) as error:
            response = error_response(error)
        await response(scope, receive, send)


async def _read(receive: Receive) -> bytes:
    parts, has_more = [], True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _parse(body: bytes) -> MessageBatch:
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False) if body else None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    try:
        return MessageBatch.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None
