"""Counts of what became of requests, for metrics: why answers ended, and with which status others were refused."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodplain.server.streams import Deltas
from floodplain.web.gate import PUBLIC_PATHS

REASONS = ("stop", "length", "abort", "error")


class RequestCounts:
    """Counters since the server began; everything is called on the event loop.

    Attributes:
        finished: Generated choices by why they ended; ``abort``: the client or the server ended them;
            ``error``: the model computed NaN or infinity.
        refused: Answers with a status of 400 or more, except to probes and scrapers.
    """

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.refused: Counter[str] = Counter()

    async def watch(self, stream: Deltas) -> Deltas:
        """Pass a choice's stream on, and count its end once it has begun."""
        reason = "abort"
        try:
            async with aclosing(stream):
                async for delta in stream:
                    reason = delta.finish_reason or reason
                    yield delta
        finally:
            self.finished[reason] += 1


class RefusalCounter:
    """ASGI middleware that counts refusals."""

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and look at the status of its answer."""
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        is_answered = False

        async def send_counted(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                self._count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:  # raised again; the error handler outside answers with 500
            if not is_answered:
                self._count(500)
            raise

    def _count(self, status: int) -> None:
        if status >= 400:
            self._counts.refused[str(status)] += 1
