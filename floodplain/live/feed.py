"""A feed of snapshots: made while there are listeners, once for all of them, and bounded for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from floodplain.core.errors import UserError
from floodplain.live.changes import Snapshot, change, encode, whole
from floodplain.web.errors import ApiError

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
"""Seconds between two updates."""
MOST_LISTENERS = 64
"""One more takes the place of the oldest: one that reads nothing of a quiet service is not seen to be slow."""
MOST_BEHIND = 10
"""Updates that may wait for a listener, two seconds of them; then it is dropped, and may connect again."""

Drop = Callable[[], object]
"""Closes the connection of a listener: its response may wait for a client that reads nothing."""

Look = Callable[[], Awaitable[Snapshot]]
"""Returns a snapshot of now; called again and again while there are listeners."""


class _Listener:
    def __init__(self, drop: Drop) -> None:
        self.drop = drop
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_BEHIND)
        self.has_whole = False

    def put(self, message: bytes) -> bool:
        """Whether there was room for one more message."""
        if self.messages.full():
            return False
        self.messages.put_nowait(message)
        return True

    def end(self) -> None:
        while not self.messages.empty():
            self.messages.get_nowait()
        self.messages.put_nowait(None)


class Feed:
    """Sends snapshots to listeners. Everything is called on one event loop.

    ``open_look``: called when the first listener is added; its result is used until the last one is removed.
    ``is_ending``: whether all listeners are to be ended, because the service stops.
    """

    def __init__(
        self,
        open_look: Callable[[], Look],
        is_ending: Callable[[], bool] = lambda: False,
        period_s: float = PERIOD_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._open_look, self._is_ending = open_look, is_ending
        self._period_s, self._sleep = period_s, sleep
        self._listeners: dict[_Listener, None] = {}
        self._updating: asyncio.Task[None] | None = None

    async def listen(self, drop: Drop = lambda: None) -> AsyncGenerator[bytes]:
        """Server-sent events, from a whole snapshot on. Ends when the service stops, or the listener is dropped."""
        if len(self._listeners) >= MOST_LISTENERS:
            self._drop(next(iter(self._listeners)))
        listener = _Listener(drop)
        self._listeners[listener] = None
        if self._updating is None or self._updating.done():
            self._updating = asyncio.get_running_loop().create_task(self._update())
        try:
            while (message := await listener.messages.get()) is not None:
                yield message
        finally:
            self._listeners.pop(listener, None)

    def _drop(self, listener: _Listener) -> None:
        del self._listeners[listener]
        listener.end()
        listener.drop()

    async def _update(self) -> None:
        look, last = self._open_look(), Snapshot({})
        try:
            while self._listeners and not self._is_ending():
                now = await look()
                self._publish(last, now)
                last = now
                await self._sleep(self._period_s)
        except (UserError, ApiError) as error:
            logger.warning("the live page's data cannot be read now: %s", error)
        except Exception:  # a bug in the page's data ends the page's streams, and no request of the server
            logger.exception("the live page's data cannot be read")
        finally:
            for listener in self._listeners:
                listener.end()

    def _publish(self, last: Snapshot, now: Snapshot) -> None:
        """Queue one message for each listener; each kind of message is encoded once."""
        listeners = list(self._listeners)
        update = encode(change(last, now)) if any(one.has_whole for one in listeners) else b""
        first = encode(whole(now)) if not all(one.has_whole for one in listeners) else b""
        for listener in listeners:
            if not listener.put(update if listener.has_whole else first):
                self._drop(listener)
            listener.has_whole = True
