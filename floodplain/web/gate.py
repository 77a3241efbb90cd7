"""Refuses requests before they are read: by draining, secrets and body size."""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodplain.web.body_budget import BodyBudget, HeldBody
from floodplain.web.errors import ApiError, error_response
from floodplain.web.request_id import echo_request_id

PROBES = frozenset({"/health", "/ready"})
"""Paths that balancers and orchestrators probe."""

PUBLIC_PATHS = PROBES | frozenset({"/version", "/metrics", "/openapi.json"})
"""Paths for probes and scrapers, which have no secret. If there are secrets, every other path needs one."""

CLIENT_SCOPE_KEY = "floodplain.client"
"""Key of a request's scope with the result of ``Authenticator.client_of``; absent if no secret is needed."""


class Authenticator(Protocol):
    """Identifies clients by the secret in their requests."""

    def client_of(self, authorization: bytes, /) -> object | None:
        """The client of the secret in an ``Authorization`` header; None if the secret is not valid."""
        ...


class DrainSwitch:
    """Whether the server refuses new requests; turned on when it is stopped."""

    def __init__(self) -> None:
        self.is_draining = False


class Gate:
    """ASGI middleware that refuses requests by their head.

    Args:
        app: The application behind it.
        drain: While it drains, ``/v1`` and ``PROBES`` answer 503, and every answer is its connection's last.
        authenticator: Identifies the clients that may use paths outside ``PUBLIC_PATHS``; None: no key is needed.
        max_body_bytes: Larger bodies get 413, before they are read if the length is declared. The bodies of all running
            requests together are bounded by ``BodyBudget``.
    """

    def __init__(
        self, app: ASGIApp, drain: DrainSwitch, authenticator: Authenticator | None, max_body_bytes: int
    ) -> None:
        self._app = app
        self._drain = drain
        self._authenticator = authenticator
        self._budget = BodyBudget(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, send = _answer_head_as_get(scope, echo_request_id(scope, send))
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


def _answer_head_as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Return the scope of the ``GET`` that a ``HEAD`` stands for, and a ``send`` that drops the body of the answer.

    Status and headers, ``Content-Length`` included, are those of the ``GET``. Other methods pass unchanged.
    """
    if scope["method"] != "HEAD":
        return scope, send

    async def send_without_body(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return {**scope, "method": "GET"}, send_without_body


def _close_after(send: Send) -> Send:
    """A ``send`` that closes the connection after the answer, so that the client may move to another server."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_last
