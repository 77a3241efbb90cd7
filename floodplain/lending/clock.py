"""The clock for lives, deadlines and leadership."""

from __future__ import annotations

import time


def lease_clock() -> float:
    """Return seconds since the machine started, including those in which it was suspended.

    ``time.monotonic`` stands still during a suspension: the machine would resume and believe that its last message is
    recent, while all others consider it dead (clock_gettime(2), CLOCK_BOOTTIME).
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
