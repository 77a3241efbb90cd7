"""A reference for the table: what a server attains that ends requests at a constant rate and never errs on deadlines.

It is preemptive, knows rates but no lengths, and serves the earliest deadline first. A request is admitted on time if
every deadline still holds afterwards, else it is in line. The rate is that of ``timely`` in the heaviest cell with the
same lengths, pool and device. It is a reference and no proven bound: the rate is a mean, so short requests can do more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

LINE_GRACE_S = 1.0
"""Seconds added to each deadline in line, as under ``timely``."""


@dataclass(slots=True)
class Fluid:
    """The server between two arrivals. Work is counted in seconds of the whole device.

    A request on time must have ended ``window_s`` after its arrival: TTFT goal, and a mean answer at its TPOT goal.
    ``patience`` is the longest wait in line as a multiple of FCFS's (``--line-patience``); inf: no limit.
    """

    request_s: float
    window_s: float
    patience: float
    _on_time: list[list[float]] = field(default_factory=list)  # [arrival, work left], by arrival
    _line: list[list[float]] = field(default_factory=list)
    _longest_wait_s: float = 0.0

    def arrive(self, now: float) -> bool:
        """Add a request; whether it is on time. FCFS would let it wait for all work that is left."""
        self._longest_wait_s = max(self._longest_wait_s, sum(left for _, left in (*self._on_time, *self._line)))
        request = [now, self.request_s]
        self._on_time.append(request)
        if self._keeps_deadlines(now):
            return True
        self._on_time.pop()
        self._line.append(request)
        return False

    def advance(self, seconds: float, now: float) -> None:
        """Serve until ``now``, which is so many seconds later, the earliest deadline first."""
        while seconds > 0 and (self._on_time or self._line):
            queue = self._first_queue()
            served_s = min(seconds, queue[0][1])
            queue[0][1] -= served_s
            seconds -= served_s
            if queue[0][1] <= 0:
                queue.pop(0)
        if not (self._on_time or self._line):
            self._longest_wait_s = 0.0

    def _first_queue(self) -> list[list[float]]:
        if not (self._on_time and self._line):
            return self._on_time or self._line
        is_line = self._line[0][0] + self._line_s() < self._on_time[0][0] + self.window_s
        return self._line if is_line else self._on_time

    def _line_s(self) -> float:
        """Seconds from arrival until a request in line must have ended."""
        return self.patience * self._longest_wait_s + LINE_GRACE_S + self.request_s

    def _keeps_deadlines(self, now: float) -> bool:
        due = [(arrival + self.window_s, left) for arrival, left in self._on_time]
        if self.patience < inf:
            due += [(arrival + self._line_s(), left) for arrival, left in self._line]
        times = np.array(sorted(due))
        return bool(np.all(now + np.cumsum(times[:, 1]) <= times[:, 0] + 1e-9))


def count_on_time(arrivals_s: Sequence[float], can_attain: Sequence[bool], fluid: Fluid) -> int:
    """Number of requests that attain both goals; arrivals ascend, and the server is idle at first.

    ``can_attain``: whether each request attains its goals alone; the others count as in line.
    """
    now, num_on_time = 0.0, 0
    for arrival_s, can in zip(arrivals_s, can_attain, strict=True):
        fluid.advance(arrival_s - now, arrival_s)
        now = arrival_s
        num_on_time += fluid.arrive(now) and can
    return num_on_time
