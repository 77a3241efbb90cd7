"""Measures the time of each of vLLM's steps, although the next one may be planned before it ends."""

from __future__ import annotations

from collections import deque


class StepTimer:
    """Times steps that end in the order in which they begin; each computes once the one before has ended."""

    def __init__(self) -> None:
        self._outstanding: deque[tuple[float, bool]] = deque()
        self._last_end_s = 0.0

    @property
    def is_computing(self) -> bool:
        """Whether an outstanding step computes anything."""
        return any(computes for _, computes in self._outstanding)

    def begin(self, now: float, *, computes: bool) -> None:
        """Record a step that is planned, and handed to the workers."""
        self._outstanding.append((now, computes))

    def end(self, now: float) -> float:
        """Finish the oldest outstanding step, whose tokens are known; return the seconds that it took."""
        begin_s, _ = self._outstanding.popleft()
        duration_s = now - max(begin_s, self._last_end_s)
        self._last_end_s = now
        return duration_s
