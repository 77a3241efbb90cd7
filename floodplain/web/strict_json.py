"""Routes whose bodies are JSON, read strictly, and off the event loop if they are large."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from floodplain.core.errors import UserError
from floodplain.web.bodies import parse_model
from floodplain.web.workers import Workers

MAX_INLINE_BYTES = 2**16
"""Larger bodies are read in a thread: so many take a few milliseconds, for which streams may wait."""

CONTEXT = "json_context"
"""What an application's state may hold under this name is the context of validators."""

READERS = Workers(1, "json")
"""Reads large bodies. One for the process: the parser holds the interpreter, so more threads would not be faster."""


class JsonRequest(Request):
    """A request whose body is read strictly, as a model."""

    model: Any
    is_large = False

    async def json(self) -> Any:
        """The checked value of the body.

        Raises:
            ApiError: It is not JSON, or has too many parts.
            _InvalidBody: It is not what the model says.
        """
        body, context = await self.body(), getattr(self.app.state, CONTEXT, None)
        try:
            if len(body) <= MAX_INLINE_BYTES:
                return parse_model(self.model, body, context)
            self.is_large = True
            return await READERS.run(parse_model, self.model, body, context)
        except (RequestValidationError, UserError) as error:
            raise _InvalidBody(error) from None


def is_large_body(request: Request) -> bool:
    """Whether a request came by a ``JsonRoute`` with a body over ``MAX_INLINE_BYTES``."""
    return isinstance(request, JsonRequest) and request.is_large


class _InvalidBody(HTTPException):
    """Carries what is wrong with a body through FastAPI, which lets only ``HTTPException`` pass as it is."""

    def __init__(self, error: RequestValidationError | UserError) -> None:
        super().__init__(400)
        self.error = error


class JsonRoute(APIRoute):
    """A route whose bodies are read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, given a ``JsonRequest``."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                json_request.model = self.body_field.field_info.annotation
            try:
                return await handle(json_request)
            except _InvalidBody as invalid:
                raise invalid.error from None

        return handle_json
