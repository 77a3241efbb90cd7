"""Virtual time: a heap of events, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from floodplain.core.errors import InvariantError

Event = Callable[[], object]


class Environment:
    """Virtual time and its events. Events at the same time run in the order of scheduling.

    Attributes:
        now: Seconds since the start of the simulation.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()

    def schedule(self, when_s: float, event: Event) -> None:
        """Run ``event`` at ``when_s``.

        Raises:
            InvariantError: That time has passed.
        """
        if not when_s >= self.now:
            raise InvariantError(f"an event at {when_s} s is scheduled at {self.now} s")
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def run(self, until_s: float = float("inf")) -> None:
        """Run all events up to ``until_s``, those that they schedule included."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
