"""The access log of a server (``--access-log``): one line a request, without its query, headers and body."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_PATH = 200
"""Most characters of a path in the log: a client chooses them."""
IN_PATHS = "/:@!$&'()*+,;="
"""What stands in paths as it is. Anything else, such as a space, is percent-encoded, so that a path is one word."""

logger = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware that logs method, path, status and duration of a request once its answer has ended.

    The status is 500 if the application raised, and ``-`` if the client had no answer.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log it when the application returns."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s, status = self._clock(), "-"

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:  # raised again; the error handler outside answers with 500
            status = "500" if status == "-" else status
            raise
        finally:
            path = quote(scope["path"], safe=IN_PATHS)[:MAX_PATH]
            logger.info("%s %s %s %.3f s", scope["method"], path, status, self._clock() - begun_s)
