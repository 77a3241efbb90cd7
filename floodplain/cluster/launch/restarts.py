"""Delays and limits of restarts of an instance. Pure."""

from __future__ import annotations

FIRST_DELAY_S, MOST_DELAY_S = 0.1, 30.0
SETTLED_S = 1.0
"""An instance that served for less time counts as a failed start."""
CALM_S = 60.0
"""After an instance served for so long, the delay is reset."""
MAX_FAILED_STARTS = 5
"""After so many failed starts in a row it is not restarted."""


class Restarts:
    """The restarts of one slot: delays double, and failed starts in a row are bounded.

    Attributes:
        num_failed: Failed starts in a row.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self._num_short = 0

    def next_delay_s(self, served_s: float | None) -> float | None:
        """Count an end; the seconds until the restart, or None: no restart.

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
