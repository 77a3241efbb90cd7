"""When an instance that ended is started again. Pure."""

from __future__ import annotations

FIRST_DELAY_S, MOST_DELAY_S = 0.1, 30.0
SETTLED_S = 1.0
"""An instance that served for less was lost while it started."""
CALM_S = 60.0
"""An instance that served for so long was well: the delay begins anew."""
MAX_FAILED_STARTS = 5
"""So many starts in a row that came to nothing: it is not started again."""


class Restarts:
    """The restarts of one slot: delays double, and starts that come to nothing are bounded.

    Attributes:
        num_failed: Starts in a row that came to nothing.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self._num_short = 0

    def next_delay_s(self, served_s: float | None) -> float | None:
        """Seconds until it is started again; None: never.

        Args:
            served_s: How long it served; None if it never did.
        """
        self.num_failed = self.num_failed + 1 if served_s is None or served_s < SETTLED_S else 0
        if self.num_failed >= MAX_FAILED_STARTS:
            return None
        if served_s is not None and served_s >= CALM_S:
            self._num_short = 0
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0**self._num_short)
        self._num_short = min(self._num_short + 1, 16)
        return delay_s
