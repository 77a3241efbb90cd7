"""Runs chat templates, which are programs from the model's folder: they may fail in any way, or never end."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from floodplain.core.errors import RequestRefused

MAX_RENDER_S = 10.0
"""Longest run of a template: a thousand times the time of a long conversation."""

_TEMPLATE_FILE = "<template>"
"""The file name with which Jinja compiles templates."""
_MAX_QUOTED_CHARS = 300


class TemplateTooSlow(Exception):
    """A template ran longer than ``MAX_RENDER_S``."""


@contextmanager
def template_errors(max_render_s: float = MAX_RENDER_S) -> Generator[None]:
    """Raise RequestRefused, with the error, if the template rendered in this context fails or takes too long."""
    try:
        with _time_limit(max_render_s):
            yield
    except Exception as error:  # a template may raise anything: KeyError, OverflowError, ...
        reason = " ".join(str(error).split())[:_MAX_QUOTED_CHARS]
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise RequestRefused(f"the chat template refuses these messages: {kind}{reason}", field="messages") from None


@contextmanager
def _time_limit(max_render_s: float) -> Generator[None]:
    """Stop a template at the first line that starts after the limit. Traces this thread; slows no other code."""
    end_s = time.monotonic() + max_render_s

    def check(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > end_s:
            raise TemplateTooSlow(f"it ran longer than {max_render_s:g} seconds")
        return check

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return check if frame.f_code.co_filename == _TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
