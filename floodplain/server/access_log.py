"""The access log (``--access-log``), one line a request without its query, headers and body; counts refusals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from floodplain.server.counts import RequestCounts

MAX_PATH = 200
"""Most characters of a path in the log: a client chooses them."""
IN_PATHS = "/:@!$&'()*+,;="
"""What stands in paths as it is. Anything else, such as a space, is percent-encoded, so that a path is one word."""

logger = logging.getLogger(__name__)


class AnswerWatch:
    """ASGI middleware that counts refusals and, if ``is_logged``, logs a request once its answer has ended.

    A line has method, path, status and duration. Status: 500 if the application raised, ``-`` if the client got none.
    """

    def __init__(
        self, app: ASGIApp, counts: RequestCounts, *, is_logged: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._counts, self._is_logged, self._clock = app, counts, is_logged, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and note the status of its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s, status = self._clock(), 0

        def note(new: int) -> None:
            nonlocal status
            status = new
            self._counts.note_status(scope["path"], new)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:  # raised again; the error handler outside answers with 500
            if not status:
                note(500)
            raise
        finally:
            if self._is_logged:
                path = quote(scope["path"], safe=IN_PATHS)[:MAX_PATH]
                logger.info("%s %s %s %.3f s", scope["method"], path, status or "-", self._clock() - begun_s)
