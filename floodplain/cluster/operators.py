"""Who may look at the cluster, and who may change it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from floodplain.server.auth import Client
from floodplain.web.errors import ApiError
from floodplain.web.gate import CLIENT_SCOPE_KEY
from floodplain.web.origin import LOOPBACK_ONLY, expect_json, expect_own_names
from floodplain.web.strict_json import JsonRoute

OWN_NAMES = "own_names"
"""What an application's state holds under this name are the names by which it may be asked for."""


class OperatorRoute(JsonRoute):
    """A route about the cluster. With API keys, any may look, and an admin's change; without, this machine may do both.

    Without keys a web page that is open on this machine is kept out, by ``Host``, ``Origin`` and ``Content-Type``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, behind the check."""
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
