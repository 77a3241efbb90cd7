"""``POST /v1/messages`` without a framework: nearly all requests to a coordinator are of this kind.

FastAPI documents it like the others (``app.py``), but took half of the processor's time for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from floodplain.coordinator.bodies import MessageBatch
from floodplain.coordinator.tokens import UNRESTRICTED, Caller, first_refused
from floodplain.core.errors import UserError
from floodplain.leases.messages import Message
from floodplain.web.bodies import parse_model
from floodplain.web.errors import ApiError, error_response
from floodplain.web.gate import CLIENT_SCOPE_KEY
from floodplain.web.origin import expect_json
from floodplain.web.strict_json import READERS

PATH = "/v1/messages"
FEW_BYTES = 2**13
"""A larger body is parsed in a thread: a batch of a thousand messages would delay other requests for too long."""


class MessageRoute:
    """ASGI middleware that answers batches of messages itself.

    Args:
        app: Gets all other requests.
        answer: Returns the response to a caller's batch.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[Sequence[Message], Caller], Awaitable[Response]]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a batch of messages, or pass the request to the application."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            expect_json(scope)
            body = await _read(receive)
            caller = scope.get(CLIENT_SCOPE_KEY, UNRESTRICTED)
            if len(body) <= FEW_BYTES:
                messages = _parse(body, caller)
            else:
                messages = await READERS.run(_parse, body, caller)
            response = await self._answer(messages, caller)
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


def admit(batch: MessageBatch, caller: Caller) -> Sequence[Message]:
    """Return the messages of a batch, if the caller may send all of them.

    Raises:
        ApiError: 403: it may not send one of them.
    """
    refused = first_refused(caller, batch.messages)
    if refused is not None:
        kind = type(refused).__name__.lower()
        raise ApiError(403, f"this token may not say {kind} for {refused.name}", code="forbidden")
    return batch.messages


def _parse(body: bytes, caller: Caller) -> Sequence[Message]:
    return admit(parse_model(MessageBatch, body or b"null"), caller)
