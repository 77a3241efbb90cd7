"""Bodies of JSON, read with pydantic's parser: strict about Unicode and numbers, and with errors that say where."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from floodplain.web.errors import ApiError


class JsonRequest(Request):
    """A request whose body is read strictly."""

    async def json(self) -> Any:
        """The value of the body.

        Raises:
            ApiError: It is not JSON.
        """
        body = await self.body()
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from None


class JsonRoute(APIRoute):
    """A route whose bodies are read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, given a ``JsonRequest``."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
