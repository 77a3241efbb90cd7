"""The W3C headers with which a client names the trace that its request belongs to."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

TRACE_SCOPE_KEY = "floodplain.trace_headers"
"""Key of a request's scope with its trace headers, as pairs; absent if the server traces nothing."""

_NAMES = (b"traceparent", b"tracestate")


class TraceHeaders:
    """ASGI middleware that keeps a request's trace headers in its scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            given = [(name, value) for name, value in scope["headers"] if name in _NAMES]
            scope[TRACE_SCOPE_KEY] = tuple((name.decode(), value.decode("latin-1")) for name, value in given)
        await self._app(scope, receive, send)
