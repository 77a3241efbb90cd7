"""Who comes in: draining, secrets and body size are decided before a request is read."""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodplain.web.body_budget import BodyBudget, HeldBody
from floodplain.web.errors import ApiError, error_response
from floodplain.web.head import answer_head_as_get
from floodplain.web.request_id import echo_request_id

PROBES = frozenset({"/health", "/ready"})
"""What balancers and orchestrators ask."""

PUBLIC_PATHS = PROBES | frozenset({"/version", "/metrics", "/openapi.json"})
"""For probes and scrapers, which have no secret. Every other path needs one where there are any."""

CLIENT_SCOPE_KEY = "floodplain.client"
"""Where a request's scope holds who sends it, as ``Authenticator.client_of`` says; absent when everybody is let in."""


class Authenticator(Protocol):
    """Knows clients by the secret that their requests carry."""

    def client_of(self, authorization: bytes, /) -> object | None:
        """The client that sends a request with this ``Authorization`` header; None if it is not valid."""
        ...


class DrainSwitch:
    """Whether the server refuses new requests; turned on when it is stopped."""

    def __init__(self) -> None:
        self.is_draining = False


class Gate:
    """ASGI middleware that refuses requests on what their head alone says.

    Args:
        app: What lies behind.
        drain: While it drains, ``/v1`` and ``PROBES`` answer 503, and every answer is its connection's last.
        authenticator: Knows who may use what is not in ``PUBLIC_PATHS``; None: no key is asked for.
        max_body_bytes: Larger bodies get 413, before they are read if the length is declared. All bodies of requests
            that run are bounded, too: see ``BodyBudget``.
    """

    def __init__(
        self, app: ASGIApp, drain: DrainSwitch, authenticator: Authenticator | None, max_body_bytes: int
    ) -> None:
        self._app = app
        self._drain = drain
        self._authenticator = authenticator
        self._budget = BodyBudget(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, send = answer_head_as_get(scope, echo_request_id(scope, send))
        if self._drain.is_draining:
            send = _close_after(send)
        try:
            self._admit(scope)
        except ApiError as refusal:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status_code == 401 else None
            await error_response(refusal, headers)(scope, receive, send)
            return
        body = HeldBody(receive, self._budget)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._drain.is_draining and (path.startswith("/v1/") or path in PROBES):
            raise ApiError(503, "the server is stopping: send requests elsewhere", code="draining")
        if path not in PUBLIC_PATHS and self._authenticator is not None:
            client = self._authenticator.client_of(headers.get(b"authorization", b""))
            if client is None:
                raise ApiError(401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
            scope[CLIENT_SCOPE_KEY] = client
        self._budget.check_length(headers.get(b"content-length", b"0"))


def _close_after(send: Send) -> Send:
    """A ``send`` whose answer tells the client to use another connection, to another server perhaps."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_last
