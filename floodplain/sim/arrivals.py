"""Sends the requests of a scenario at their arrival times, or when one before them has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from floodplain.core.request import Request
from floodplain.sim.environment import Environment, Event


class Arrivals:
    """Requests on their way to a fleet, of which at most ``most`` are unanswered at a time.

    The others wait before they are sent, as behind ``--max-concurrency`` of ``floodplain bench``: then a request's
    ``arrival_s`` is the time when it was sent. ``send`` returns whether the fleet accepted the request.

    ``num_loads``: loads of which a request is still to come.
    """

    def __init__(self, environment: Environment, send: Callable[[Request], bool], most: int | None = None) -> None:
        self.num_loads = 0
        self._environment, self._send = environment, send
        self._num_unanswered, self._most = 0, inf if most is None else most
        self._held: deque[Request] = deque()

    def expect(self, requests: Iterable[Request]) -> None:
        """Send each request at its arrival time, or later. They are read one by one, and are in order of arrival."""
        self.num_loads += 1
        self._environment.schedule_all(self._events_of(requests))

    @property
    def has_unsent(self) -> bool:
        """Whether a request is still to be sent."""
        return bool(self.num_loads or self._held)

    def note_ended(self, num_ended: int) -> None:
        """Note that requests were answered: those that wait are sent once the engine has gone on."""
        self._num_unanswered -= num_ended
        if self._held:
            self._environment.schedule(self._environment.now, self._send_held)

    def _events_of(self, requests: Iterable[Request]) -> Iterator[tuple[float, Event]]:
        for request in requests:
            yield request.arrival_s, partial(self._arrive, request)
        self.num_loads -= 1

    def _arrive(self, request: Request) -> None:
        self._held.append(request)
        self._send_held()

    def _send_held(self) -> None:
        while self._held and self._num_unanswered < self._most:
            request = replace(self._held.popleft(), arrival_s=self._environment.now)
            self._num_unanswered += self._send(request)
