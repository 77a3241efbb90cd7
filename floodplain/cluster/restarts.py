"""When an instance that ended is started again. Pure."""

from __future__ import annotations

FIRST_DELAY_S, MOST_DELAY_S = 0.1, 30.0
CALM_S = 60.0
"""An instance that served for so long was well: the delay begins anew."""
MAX_FAILED_STARTS = 5
"""So many starts in a row that never joined: it is not started again."""


class Restarts:
    """The restarts of one slot: delays double, and starts that come to nothing are bounded."""

    def __init__(self) -> None:
        self._num_short = self._num_failed = 0

    def next_delay_s(self, joined_for_s: float | None) -> float | None:
        """Seconds until it is started again; None: never.

        Args:
            joined_for_s: How long it served; None if it never joined.
        """
        self._num_failed = self._num_failed + 1 if joined_for_s is None else 0
        if self._num_failed >= MAX_FAILED_STARTS:
            return None
        if joined_for_s is not None and joined_for_s >= CALM_S:
            self._num_short = 0
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0**self._num_short)
        self._num_short = min(self._num_short + 1, 16)
        return delay_s
