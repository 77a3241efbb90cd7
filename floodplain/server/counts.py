"""Counts of what became of requests, for metrics: why answers ended, and with which status others were refused."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing

from floodplain.server.streams import Deltas
from floodplain.web.gate import PUBLIC_PATHS

REASONS = ("stop", "length", "abort", "error")


class RequestCounts:
    """Counters since the server began; everything is called on the event loop.

    ``finished``: generated choices by why they ended; ``abort``: the client or the server ended them; ``error``: the
    model computed NaN or infinity. ``refused``: answers with a status of 400 or more, except to probes and scrapers.
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

    def note_status(self, path: str, status: int) -> None:
        """Count an answer with this status to a request for ``path``, if it is a refusal."""
        if status >= 400 and path not in PUBLIC_PATHS:
            self.refused[str(status)] += 1
