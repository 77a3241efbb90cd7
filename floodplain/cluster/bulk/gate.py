"""Delays bulk transfers while a stage computes activations, for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class BulkGate:
    """Open while no holder is in ``busy``. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_busy = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Hold the gate shut; several holders may overlap."""
        with self._changed:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_busy -= 1
                if not self._num_busy:
                    self._changed.notify_all()

    def wait(self, max_s: float) -> bool:
        """Wait until the gate is open, at most ``max_s`` seconds. True if it is open."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_busy, max_s)
