"""The last resort: a thread that frees borrowed memory at its deadline, whatever the step loop is doing."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PeerWatch:
    """Calls ``hurry`` at deadlines and news. ``start`` it, and ``close`` it before what ``hurry`` frees.

    Args:
        hurry: Frees what is due; returns the seconds until the next deadline, None if nothing is recalled.
    """

    def __init__(self, hurry: Callable[[], float | None]) -> None:
        self._hurry = hurry
        self._has_news = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Call ``hurry`` soon, because deadlines may have changed. Callable on any thread."""
        self._has_news.set()

    def close(self) -> None:
        """Stop. Safe to call twice."""
        self._is_closing = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closing:
            left_s = self._hurry()
            self._has_news.wait(left_s if left_s is None else max(left_s, 0.0))
            self._has_news.clear()
