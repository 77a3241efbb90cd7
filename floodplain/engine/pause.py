"""A pause of an engine's thread between two steps, for work that needs all of its memory at rest."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any, TypeVar, cast

from floodplain.engine.shell import Engine

T = TypeVar("T")


class Pause:
    """Holds an engine's thread between two steps, where it runs given functions.

    Args:
        loop: The event loop of the callers.

    Attributes:
        begun: Done when the thread is held.
        is_over: Whether it was released.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun: asyncio.Future[Engine] = loop.create_future()
        self.is_over = False
        self._loop = loop
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, function: Callable[[Engine], T]) -> T:
        """Call ``function`` with the engine on its thread; return its result or raise its exception here."""
        engine, result = await self.begun, self._loop.create_future()

        def work() -> None:
            try:
                value = function(engine)
            except BaseException as error:
                self._loop.call_soon_threadsafe(_settle, result, error, None)
            else:
                self._loop.call_soon_threadsafe(_settle, result, None, value)

        self._work.put(work)
        return cast(T, await result)

    def release(self) -> None:
        """Let the engine's thread continue. Safe to call twice."""
        self.is_over = True
        self._work.put(None)

    def begin(self, engine: Engine) -> None:
        """Note that the engine's thread is held now; called on the event loop."""
        if not self.begun.done():
            self.begun.set_result(engine)

    def fail(self, error: BaseException) -> None:
        """Note that the engine's thread has failed and will never be held; called on the event loop."""
        _settle(self.begun, RuntimeError(f"the engine failed: {error}"), None)

    def hold(self) -> None:
        """Run given functions until ``release``; called on the engine's thread."""
        while (work := self._work.get()) is not None:
            work()


def _settle(future: asyncio.Future[Any], error: BaseException | None, value: Any) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
