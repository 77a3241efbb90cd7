"""Measures the time of each of vLLM's steps, although the next one may be planned before it ends."""

from __future__ import annotations

from collections import deque


class StepTimer:
    """Times steps that end in the order in which they begin; each computes once the one before has ended."""

    def __init__(self) -> None:
        self._outstanding: deque[tuple[float, bool, bool]] = deque()
        self._last_end_s = 0.0

    @property
    def is_computing(self) -> bool:
        """Whether an outstanding step computes anything."""
        return any(computes for _, computes, _ in self._outstanding)

    def begin(self, now: float, *, computes: bool, has_copies: bool) -> None:
        """Record a step that is planned, and handed to the workers; ``has_copies``: copies run beside it."""
        self._outstanding.append((now, computes, has_copies))

    def end(self, now: float) -> tuple[float, bool]:
        """Finish the oldest outstanding step, whose tokens are known: (the seconds that it took, ``has_copies``)."""
        begin_s, _, has_copies = self._outstanding.popleft()
        duration_s = now - max(begin_s, self._last_end_s)
        self._last_end_s = now
        return duration_s, has_copies
