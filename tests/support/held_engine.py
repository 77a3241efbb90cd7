"""A real engine whose steps are held while its state is as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from floodplain.core.request import SeqId
from floodplain.engine.outputs import OutputDelta
from floodplain.engine.shell import Engine
from tests.support.waiting import HANG_S


class HeldEngine:
    """Holds an engine's step, on the thread of the engine, until the test releases it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._step = engine.step
        self._is_wanted: Callable[[Engine], bool] = lambda _: False
        self._is_held = False
        self._changed = threading.Condition()  # guards both
        engine.step = self._hold_and_step  # type: ignore[method-assign]

    def hold(self, is_wanted: Callable[[Engine], bool]) -> None:
        """Release a held step, and hold the next one before which ``is_wanted`` is true."""
        with self._changed:
            self._is_wanted, self._is_held = is_wanted, False
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when a step is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_held, HANG_S), "no state of the engine was as wanted"

    def close(self) -> None:
        """Release a held step, and hold no other one."""
        self.hold(lambda _: False)

    def _hold_and_step(self) -> list[tuple[SeqId, OutputDelta]]:
        with self._changed:
            self._is_held = self._is_wanted(self.engine)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._is_held, 2 * HANG_S), "the test released no step"
        return self._step()
