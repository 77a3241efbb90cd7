"""The clock that lives, deadlines and leadership are counted on."""

from __future__ import annotations

import time


def lease_clock() -> float:
    """Seconds since the machine started, those in which it was suspended included.

    ``time.monotonic`` stands still while a machine is suspended: it would wake up and believe that it has been heard of
    a moment ago, while everybody else took it for dead (clock_gettime(2), CLOCK_BOOTTIME).
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
