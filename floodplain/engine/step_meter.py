"""How an engine gets on: steps that began and ended, and for how long its thread has been in one piece of work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. All times are durations: clocks of two machines do not agree.

    Attributes:
        num_begun: Steps that were handed to the device, and
        num_ended: those whose results came back.
        num_copies: Copies to and from swap space that ended.
        step_s: Since when the oldest outstanding step is; None if none is.
        step_tokens: Tokens that it computes; 0 if none is.
        busy_s: How long the thread has been in one piece of its own work; None: it rests, or waits for another stage.
        longest_s: The longest step that ended.
        most_tokens: Of the largest step that ended.
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
    """Kept by the thread that computes; ``progress`` and ``renew`` may be called on any thread.

    Args:
        clock: Monotonic seconds.

    Attributes:
        num_copies: Copies that ended; the engine counts them.
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
        """The thread begins a piece of work."""
        self._busy_since_s = self._clock()

    def rest(self) -> None:
        """The thread waits for something that need not come."""
        self._busy_since_s = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within a piece of work, the thread waits for another stage: that is no work of its own."""
        self.rest()
        try:
            yield
        finally:
            self.work()

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens is handed to the device."""
        self._steps.append((self._clock(), num_tokens))
        self._num_begun += 1

    def end(self) -> None:
        """The oldest outstanding step has ended."""
        begun_s, num_tokens = self._steps.popleft()
        self._num_ended += 1
        if begun_s >= self._renewed_s:
            self._longest_s = max(self._longest_s, self._clock() - begun_s)
            self._most_tokens = max(self._most_tokens, num_tokens)

    def renew(self) -> None:
        """Forget how long steps took so far, outstanding ones included: this process may have been stopped in one."""
        self._renewed_s, self._longest_s, self._most_tokens = self._clock(), 0.0, 0

    def progress(self) -> Progress:
        """How it is now. Steps may begin and end between two reads."""
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
