"""Measures an engine's progress: steps that began and ended, and how long its thread is busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of an engine's progress. All times are durations, since clocks of two machines differ.

    Attributes:
        num_begun: Steps that were submitted to the device; ``num_ended`` of these have ended.
        num_copies: Copies to and from swap space that ended.
        step_s: Age in seconds of the oldest outstanding step, of ``step_tokens``; None without one.
        busy_s: Seconds that the thread has been in one piece of its own work; None: it rests or waits for a stage.
        longest_s: Seconds of the longest step that ended, and ``most_tokens`` the tokens of the largest.
    """

    num_begun: int = 0
    num_ended: int = 0
    num_copies: int = 0
    step_s: float | None = None
    step_tokens: int = 0
    busy_s: float | None = None
    longest_s: float = 0.0
    most_tokens: int = 0


NO_PROGRESS = Progress()


class StepMeter:
    """Updated by the thread that computes; ``progress`` and ``renew`` may be called on any thread.

    ``clock`` gives monotonic seconds. The engine counts ``num_copies``, the copies that ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_copies = 0
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()  # when each outstanding step began, and its tokens
        self._num_begun = self._num_ended = self._most_tokens = 0
        self._longest_s = 0.0
        self._busy_since_s: float | None = None
        self._renewed_s = clock()

    def work(self) -> None:
        """Note that the thread begins a piece of work."""
        self._busy_since_s = self._clock()

    def rest(self) -> None:
        """Note that the thread waits for an event that may never occur."""
        self._busy_since_s = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the thread waits for others within a piece of work; that time does not count as work."""
        self.rest()
        try:
            yield
        finally:
            self.work()

    def begin(self, num_tokens: int) -> None:
        """Note that a step of ``num_tokens`` is submitted to the device."""
        self._steps.append((self._clock(), num_tokens))
        self._num_begun += 1

    def end(self) -> None:
        """Note that the oldest outstanding step has ended."""
        begun_s, num_tokens = self._steps.popleft()
        self._num_ended += 1
        if begun_s >= self._renewed_s:
            self._longest_s = max(self._longest_s, self._clock() - begun_s)
            self._most_tokens = max(self._most_tokens, num_tokens)

    def renew(self) -> None:
        """Drop the times of steps so far, even outstanding ones: the process may have been suspended in one."""
        self._renewed_s, self._longest_s, self._most_tokens = self._clock(), 0.0, 0

    def progress(self) -> Progress:
        """The current progress. Steps may begin and end between its reads."""
        oldest, busy_since_s, now = next(iter(self._steps.copy()), None), self._busy_since_s, self._clock()
        return Progress(
            num_begun=self._num_begun,
            num_ended=self._num_ended,
            num_copies=self.num_copies,
            step_s=None if oldest is None else max(0.0, now - oldest[0]),
            step_tokens=0 if oldest is None else oldest[1],
            busy_s=None if busy_since_s is None else max(0.0, now - busy_since_s),
            longest_s=self._longest_s,
            most_tokens=self._most_tokens,
        )
