"""Virtual time and its events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from math import inf

from floodplain.core.errors import InvariantError

Event = Callable[[], object]


class Environment:
    """Virtual time and its events. Events at the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order, self._until_s = count(), inf

    def schedule(self, when_s: float, event: Event) -> None:
        """Run ``event`` at ``when_s``; InvariantError if that time has passed."""
        if not when_s >= self.now:
            raise InvariantError(f"an event at {when_s} s is scheduled at {self.now} s")
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def schedule_all(self, events: Iterator[tuple[float, Event]]) -> None:
        """Run (time, event) pairs of a stream, in order of time, as if all were scheduled now.

        Each pair is read when the one before it runs. InvariantError if its time has passed.
        """
        self._read(events, next(self._order))

    def _read(self, events: Iterator[tuple[float, Event]], order: int) -> None:
        if (head := next(events, None)) is None:
            return
        when_s, event = head
        if not when_s >= self.now:
            raise InvariantError(f"an event at {when_s} s is read from its stream at {self.now} s")

        def run() -> None:
            self._read(events, order)
            event()

        heapq.heappush(self._events, (when_s, order, run))

    @property
    def next_s(self) -> float:
        """The time of the next event, or at which the run ends; inf if there is none."""
        return min(self._events[0][0], self._until_s) if self._events else self._until_s

    def run(self, until_s: float = inf) -> None:
        """Run all events up to ``until_s``, those that they schedule included."""
        self._until_s = until_s
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
