"""Access checks of the routes that show and change the cluster."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from floodplain.server.auth import Client
from floodplain.web.errors import ApiError
from floodplain.web.gate import CLIENT_SCOPE_KEY
from floodplain.web.json_routes import JsonRoute
from floodplain.web.origin import LOOPBACK_ONLY, expect_json, expect_own_names

OWN_NAMES = "own_names"
"""Attribute of an application's state with the host names under which it answers."""


class OperatorRoute(JsonRoute):
    """A route about the cluster. With API keys, any key may read, an admin's may change; else this machine may do both.

    Without keys, requests of a web page open on this machine are refused by ``Host``, ``Origin`` and ``Content-Type``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, behind the access check."""
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            _expect_operator(request)
            return await handle(request)

        return handle_checked


def _expect_operator(request: Request) -> None:
    client: Client | None = request.scope.get(CLIENT_SCOPE_KEY)
    is_change = request.method != "GET"
    if client is None:
        expect_own_names(request.scope, getattr(request.app.state, OWN_NAMES, LOOPBACK_ONLY))
        if is_change:
            expect_json(request.scope)
    elif is_change and not client.is_admin:
        raise ApiError(403, "this takes the key of an admin: a line admin NAME KEY of --api-key-file", code="forbidden")
