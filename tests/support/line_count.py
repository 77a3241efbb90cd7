"""Counts lines of Python: a law about the growth of work that no clock has a part in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def count_lines(act: Callable[[], object]) -> int:
    """Lines of the product that run; what runs in C is none, and what a garbage collection calls is not counted."""
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
