"""A real engine whose steps are held while its state is as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from floodplain.core.request import SeqId
from floodplain.engine.outputs import OutputDelta
from floodplain.engine.shell import Engine
from tests.support.waiting import HANG_S


class HeldEngine:
    """Stands before the steps of an engine, on the thread that takes them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._step = engine.step
        self._is_wanted: Callable[[Engine], bool] = lambda _: False
        self._is_held, self._releases = threading.Event(), threading.Semaphore(0)
        engine.step = self._hold_and_step  # type: ignore[method-assign]

    def hold(self, is_wanted: Callable[[Engine], bool]) -> None:
        """Let steps go on, until the next one before which ``is_wanted``."""
        self._is_wanted = is_wanted
        if self._is_held.is_set():
            self._is_held.clear()
            self._releases.release()

    def wait(self) -> None:
        """Return when a step is held."""
        assert self._is_held.wait(HANG_S), "no state of the engine was as wanted"

    def close(self) -> None:
        """Let all steps go on."""
        self.hold(lambda _: False)

    def _hold_and_step(self) -> list[tuple[SeqId, OutputDelta]]:
        if self._is_wanted(self.engine):
            self._is_held.set()
            assert self._releases.acquire(timeout=2 * HANG_S), "the test did not let the engine go on"
        return self._step()
