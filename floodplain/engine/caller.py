"""One caller of an engine that runs on its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from floodplain.core.request import Request, SeqId
from floodplain.engine.outputs import OutputDelta
from floodplain.engine.shell import Engine

OnAdded = Callable[[Engine, SeqId], None]
"""Called on the engine's thread when a request is queued, before a step can schedule it."""


@dataclass(eq=False, slots=True)
class Caller:
    """The caller of one ``AsyncEngine.generate``, with its request and results.

    Attributes:
        request: The request.
        accepted: Done when the engine has accepted or refused it.
        on_added: Called on the engine's thread when the request is queued; None calls nothing.
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
        """Raise ``error`` in the caller: its request was refused, or the engine has ended."""
        if self.accepted.done():
            self.deltas.put_nowait(error)
        else:
            self.accepted.set_exception(error)
