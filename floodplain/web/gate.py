"""Refuses requests before they are read: by names, draining, secrets, body size. Echoes the client's request id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodplain.web.bearer import SecretRing
from floodplain.web.errors import ApiError, error_response
from floodplain.web.origin import OwnNames, expect_own_names

HEADER = b"x-request-id"
REQUEST_ID = r"^[!-~]{1,256}$"
"""Printable ASCII without spaces."""


def is_request_id(name: str) -> bool:
    """Whether a client may use this name for a request."""
    return re.fullmatch(REQUEST_ID[1:-1], name) is not None


def echo_request_id(scope: Scope, send: Send) -> Send:
    """A ``send`` that adds the request's ``X-Request-Id`` to the answer, if it has a valid one."""
    name = dict(scope["headers"]).get(HEADER, b"")
    return _adding(send, (HEADER, name)) if is_request_id(name.decode("latin-1")) else send


def _adding(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return send_more


BODIES_AT_ONCE = 64
"""Bodies of the largest size that may be held at once; thousands of usual bodies together are smaller."""


class BodyBudget:
    """Most bytes of bodies: of one, and of all running requests (None: ``BODIES_AT_ONCE`` of the largest)."""

    def __init__(self, max_body_bytes: int, max_held_bytes: int | None = None) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_held_bytes = 0
        self._max_held_bytes = max_held_bytes or BODIES_AT_ONCE * max_body_bytes

    def check_length(self, declared: bytes) -> None:
        """Raise ApiError 413 if the ``Content-Length`` is too large."""
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            raise self._too_large()

    @contextmanager
    def hold(self, receive: Receive) -> Iterator[Receive]:
        """A ``receive`` that counts the bytes of a request's body, until the context ends.

        It raises ApiError: 413 if the body has too many bytes so far, 503 if all bodies have.
        """
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_added = len(message.get("body", b""))
            num_bytes += num_added
            self.num_held_bytes += num_added
            if num_bytes > self.max_body_bytes:
                raise self._too_large()
            if self.num_held_bytes > self._max_held_bytes:
                fill = f"the bodies of requests that run fill the {self._max_held_bytes} bytes there are"
                raise ApiError(503, f"{fill}: try again later", code="bodies_too_large")
            return message

        try:
            yield receive_counted
        finally:
            self.num_held_bytes -= num_bytes

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is over {self.max_body_bytes} bytes: send less", code="body_too_large")


PROBES = frozenset({"/health", "/ping", "/ready"})
"""Paths that balancers and orchestrators probe."""

PAGE_FOLDER = "/page/"
"""Prefix of the paths of the live page's files, which are the same for all clients."""

PUBLIC_PATHS = PROBES | frozenset({"/", "/version", "/metrics", "/openapi.json"})
"""Paths of probes, scrapers and the live page, which have no secret. If there are secrets, every other path needs one,
except those in ``PAGE_FOLDER``."""

CLIENT_SCOPE_KEY = "floodplain.client"
"""Key of a request's scope with the result of ``SecretRing.client_of``; absent if no secret is needed."""

HEAD_SCOPE_KEY = "floodplain.head"
"""Key of a request's scope that is there if the client sent ``HEAD``, which the application gets as ``GET``."""


class DrainSwitch:
    """Whether the server refuses new requests; turned on when it is stopped."""

    def __init__(self) -> None:
        self.is_draining = False


class Gate:
    """ASGI middleware that refuses requests by their head.

    Of requests that a browser sends, ``Host`` and ``Origin`` must be ``names``; None: any may ask. While ``drain`` is
    on, ``/v1`` and ``PROBES`` answer 503, and every answer is its connection's last. ``secrets`` identify the clients
    of paths that are not public; None: no secret is needed. Bodies above ``max_body_bytes`` get 413, before they are
    read if the length is declared.
    """

    def __init__(
        self,
        app: ASGIApp,
        drain: DrainSwitch,
        secrets: SecretRing[Any] | None,
        max_body_bytes: int,
        names: OwnNames | None = None,
    ) -> None:
        self._app, self._drain, self._secrets, self._names = app, drain, secrets, names
        self._budget = BodyBudget(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, send = _answer_head_as_get(scope, echo_request_id(scope, send))
        if self._drain.is_draining:
            send = _adding(send, (b"connection", b"close"))  # so that the client may move to another server
        try:
            self._admit(scope)
        except ApiError as refusal:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status_code == 401 else None
            await error_response(refusal, headers)(scope, receive, send)
            return
        with self._budget.hold(receive) as receive_counted:
            await self._app(scope, receive_counted, send)

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._names is not None:
            expect_own_names(scope, self._names)
        if self._drain.is_draining and (path.startswith("/v1/") or path in PROBES):
            raise ApiError(503, "the server is stopping: send requests elsewhere", code="draining")
        is_public = path in PUBLIC_PATHS or path.startswith(PAGE_FOLDER)
        if self._secrets is not None and not is_public:
            client = self._secrets.client_of(headers.get(b"authorization", b""))
            if client is None:
                raise ApiError(401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
            scope[CLIENT_SCOPE_KEY] = client
        self._budget.check_length(headers.get(b"content-length", b"0"))


def _answer_head_as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """The ``GET`` that a ``HEAD`` stands for, and a ``send`` that drops its body; other methods pass unchanged."""
    if scope["method"] != "HEAD":
        return scope, send

    async def send_without_body(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return {**scope, "method": "GET", HEAD_SCOPE_KEY: True}, send_without_body
