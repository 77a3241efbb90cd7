"""Waiting for what happens in other threads and processes: for as long as it takes, up to a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_S = 60.0
"""The limit of what a test waits for. What takes longer hangs: a busy machine alone must not come to that."""


def wait_until(condition: Callable[[], T], timeout_s: float = HANG_S) -> T:
    """What ``condition`` says once it says something true."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"it did not come about within {timeout_s} s"
        time.sleep(0.005)
    return value
