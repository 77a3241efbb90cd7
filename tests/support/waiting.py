"""Waiting for events in other threads and processes, up to a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_S = 60.0
"""The time limit of waits in tests: a busy machine alone must not reach it."""


def wait_until(condition: Callable[[], T], timeout_s: float = HANG_S) -> T:
    """Return the value of ``condition`` once it is true; fail after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"it did not come about within {timeout_s} s"
        time.sleep(0.005)
    return value
