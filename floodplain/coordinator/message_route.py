"""``POST /v1/messages`` without a framework around it: nearly all that a coordinator is asked comes this way.

FastAPI documents it like the others (``app.py``), and took half of the processor's time for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pydantic_core
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from floodplain.coordinator.requests import MAX_FIELDS, MAX_MESSAGES, MAX_SHARDS, MessageBatch
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
            _expect_json(scope)
            batch = _parse(await _read(receive))
            response = await self._answer(batch, scope.get(CLIENT_SCOPE_KEY, ANYBODY))
        except ClientDisconnect:
            return
        except HTTPException as error:
            response = error_response(error, error.headers)
        except (UserError, RequestValidationError) as error:
            response = error_response(error)
        await response(scope, receive, send)


def _expect_json(scope: Scope) -> None:
    """A browser lets no page send this type to another site without asking that site first."""
    kinds = [value.partition(b";")[0].strip().lower() for name, value in scope["headers"] if name == b"content-type"]
    if kinds != [b"application/json"]:
        raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")


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
    _check_width(value)
    try:
        return MessageBatch.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None


def _check_width(value: Any) -> None:
    """Refuse objects of many fields, each of which would become an error of its own. Lists check their lengths."""
    messages = value.get("messages") if isinstance(value, dict) else None
    messages = messages[: MAX_MESSAGES + 1] if isinstance(messages, list) else []
    parts = [part for message in messages if isinstance(message, dict) for part in message.values()]
    shards = [shard for part in parts if isinstance(part, list) for shard in part[: MAX_SHARDS + 1]]
    for one in (value, *messages, *parts, *shards):
        if isinstance(one, dict) and len(one) > MAX_FIELDS:
            raise ApiError(400, f"messages: an object has over {MAX_FIELDS} fields: no message has so many")
