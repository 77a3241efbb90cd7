"""Server-sent events for requests that may wait long: the head is sent early, and comments meanwhile.

Under bursts requests wait, and proxies cut connections that are silent for a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from floodplain.server.streams import unless_hung_up

PING = b": ping\n\n"
"""A comment, which clients skip. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that forbid proxies to buffer events; the second is nginx's."""


class Acceptance:
    """Tracks whether an engine has accepted all parts of one HTTP request.

    Args:
        num_requests: Number of parts.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_left = num_requests
        self.is_whole = asyncio.Event()

    def note(self) -> None:
        """Note that one more part was accepted."""
        self._num_left -= 1
        if self._num_left == 0:
            self.is_whole.set()


class EventStream(StreamingResponse):
    """Server-sent events whose head is sent once the request is accepted, after ``ping_s`` at the latest.

    A failure of ``events`` before the head is raised, so that it sets the status; later it becomes the last event.
    ``events`` is closed in every case: at the end, by a disconnect, or on cancellation.

    Args:
        events: Whole events.
        accepted: Set when the request is accepted.
        ping_s: Seconds of silence after which a comment is sent; 0: never.
        describe: Makes the events that end the stream after a failure.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        accepted: asyncio.Event,
        ping_s: float,
        describe: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._events, self._accepted, self._ping_s, self._describe = events, accepted, ping_s, describe
        self._opening = asyncio.Lock()
        self._has_begun = False
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; stop at once when the client disconnects."""
        await unless_hung_up(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        waiting = asyncio.create_task(self._bridge_silences(send))
        try:
            last = await self._send_events(send)
        finally:
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all events; return the bytes that end the stream: none, or the error events after a failure."""
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._begin(send)
                    await self._send(send, event)
            await self._begin(send)
        except Exception as error:
            async with self._opening:
                if not self._has_begun:
                    raise
            return self._describe(error)
        return b""

    async def _bridge_silences(self, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ping_s or None):
                await self._accepted.wait()
        await self._begin(send)
        while self._ping_s:
            silent_s = asyncio.get_running_loop().time() - self._sent_s
            if silent_s < self._ping_s:
                await asyncio.sleep(self._ping_s - silent_s)
            else:
                await self._send(send, PING)

    async def _begin(self, send: Send) -> None:
        """Send the head if it is not sent yet: from then on the status is 200."""
        if self._has_begun:
            return
        async with self._opening:
            if not self._has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._note_sent()
                self._has_begun = True

    async def _send(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._note_sent()

    def _note_sent(self) -> None:
        self._sent_s = asyncio.get_running_loop().time()
