"""Counts executed lines of Python, for laws about the growth of work that do not use a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def count_lines(act: Callable[[], object]) -> int:
    """Return the number of executed lines of the product; C code and garbage collection do not count."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal num_lines
        if not frame.f_globals["__name__"].startswith("floodplain."):
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return num_lines
