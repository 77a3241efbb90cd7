"""Virtual time: a heap of events, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from floodplain.core.errors import InvariantError

Event = Callable[[], object]


class Environment:
    """Owner of the clock. Events at the same time happen in the order in which they were scheduled.

    Attributes:
        now: Seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()

    def schedule(self, when_s: float, event: Event) -> None:
        """Let ``event`` happen at ``when_s``.

        Raises:
            InvariantError: That time is over.
        """
        if not when_s >= self.now:
            raise InvariantError(f"an event at {when_s} s is scheduled at {self.now} s")
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def run(self, until_s: float = float("inf")) -> None:
        """Let everything happen that is due until ``until_s``, and what follows from it."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
