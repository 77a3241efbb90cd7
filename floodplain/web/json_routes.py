"""Routes whose JSON bodies are read strictly, and off the event loop if they are large."""

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
"""Larger bodies are read in a thread. So many bytes take a few milliseconds, by which streams may be delayed."""

CONTEXT = "json_context"
"""Attribute of an application's state with the context of validators; optional."""

READERS = Workers(1, "json")
"""Reads large bodies. One thread: the parser holds the GIL, so more would not be faster."""


class JsonRequest(Request):
    """A request whose body is read strictly, as a model."""

    model: Any
    is_large = False

    async def json(self) -> Any:
        """The validated value of the body.

        Raises:
            ApiError: It is not JSON, or has too many parts.
            _InvalidBody: It does not fit the model.
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
    """Whether a request of a ``JsonRoute`` has a body over ``MAX_INLINE_BYTES``."""
    return isinstance(request, JsonRequest) and request.is_large


class _InvalidBody(HTTPException):
    """Carries a body's validation error through FastAPI, which passes only ``HTTPException`` unchanged."""

    def __init__(self, error: RequestValidationError | UserError) -> None:
        super().__init__(400)
        self.error = error


class JsonRoute(APIRoute):
    """A route whose bodies are read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, which gets a ``JsonRequest``."""
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
