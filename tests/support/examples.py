"""The number of examples of a law: few in every run, many in a search for new failures."""

from __future__ import annotations

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
_FACTOR = 30 if PROFILE == "explore" else 1


def examples(count: int) -> int:
    """``count``, chosen so that the law takes a second or two; thirty times as many under ``explore``."""
    return _FACTOR * count
