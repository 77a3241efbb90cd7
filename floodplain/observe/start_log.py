"""The log of a start: its steps, the bytes of weights that are read, and the time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from floodplain.core.sizes import show_size

PROGRESS = 15
"""Level of frequent entries, below INFO; ``terminal.ProgressHandler`` decides how many are written."""

logger = logging.getLogger(__name__)


class StartLog:
    """Logs the steps of a start at ``level``, each with the seconds since this object was made."""

    def __init__(self, level: int = PROGRESS, clock: Callable[[], float] = time.monotonic) -> None:
        self._level, self._clock = level, clock
        self._begun_s = clock()
        self._step = ""

    def begin(self, step: str) -> None:
        """Log that a step begins."""
        self._step = step
        logger.log(self._level, "starting, %.1f s: %s", self._elapsed_s(), step)

    def note_bytes(self, num_bytes: int, total_bytes: int) -> None:
        """Log at level ``PROGRESS`` how much of the step is done."""
        share = 100 * num_bytes // max(1, total_bytes)
        size = show_size(num_bytes)
        logger.log(PROGRESS, "starting, %.1f s: %s, %s read (%d%%)", self._elapsed_s(), self._step, size, share)

    def end(self) -> None:
        """Log that the start is over."""
        logger.log(self._level, "started in %.1f s", self._elapsed_s())

    def _elapsed_s(self) -> float:
        return self._clock() - self._begun_s
