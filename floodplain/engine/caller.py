"""One caller of an engine that runs on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from floodplain.core.request import Request, SeqId
from floodplain.engine.outputs import OutputDelta
from floodplain.engine.shell import Engine

OnAdded = Callable[[Engine, SeqId], None]
"""Called on the engine's thread when a request waits there, before a step sees it."""


@dataclass(eq=False, slots=True)
class Caller:
    """A request of ``AsyncEngine.stream``.

    Attributes:
        request: The request.
        accepted: Done when the engine has taken or refused it.
        on_added: See ``OnAdded``.
        seq_id: Set and read on the engine's thread.
        deltas: Its results, or why the engine ended; only touched on the event loop.
    """

    request: Request
    accepted: asyncio.Future[SeqId]
    on_added: OnAdded | None
    seq_id: SeqId | None = None
    deltas: asyncio.Queue[OutputDelta | BaseException] = field(default_factory=asyncio.Queue)

    async def next_delta(self) -> OutputDelta:
        """The next result.

        Raises:
            BaseException: Why the engine ended.
        """
        delta = await self.deltas.get()
        if isinstance(delta, BaseException):
            raise delta
        return delta

    def fail(self, error: Exception) -> None:
        """The request was refused, or the engine has ended."""
        if self.accepted.done():
            self.deltas.put_nowait(error)
        else:
            self.accepted.set_exception(error)
