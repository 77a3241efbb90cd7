"""Transfer engines whose copies fail, or end, by a test's choice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from floodplain.core.tiers import CopyTime
from floodplain.memory.transfer import BlockCopy, CopyEngine, CopyResult


class FaultyTransferEngine:
    """A decorator: copies with the numbers ``failing`` (from 0) fail without moving anything."""

    def __init__(self, engine: CopyEngine[Any], failing: Sequence[int]) -> None:
        self._engine, self.slots = engine, engine.slots
        self._failing = frozenset(failing)
        self._num_submitted = 0
        self._failed: list[CopyResult] = []

    @property
    def num_in_flight(self) -> int:
        return self._engine.num_in_flight + len(self._failed)

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        if self._num_submitted in self._failing:
            self._failed.append(CopyResult(transfer_id, tuple(range(len(copy.blocks))), 0, problem="injected fault"))
        else:
            self._engine.submit(transfer_id, copy)
        self._num_submitted += 1

    def poll(self) -> list[CopyResult]:
        failed, self._failed = self._failed, []
        return failed + self._engine.poll()

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        return self.poll() or self._engine.wait(timeout_s)

    def take_copy_times(self) -> list[CopyTime]:
        return self._engine.take_copy_times()

    def close(self) -> None:
        self._engine.close()


class HeldTransferEngine:
    """A decorator: copies end once ``release`` is called, from any thread, and not before."""

    def __init__(self, engine: CopyEngine[Any]) -> None:
        self._engine, self.slots = engine, engine.slots
        self._is_released = threading.Event()

    @property
    def num_in_flight(self) -> int:
        return self._engine.num_in_flight

    def release(self) -> None:
        """Release these copies, and all later ones."""
        self._is_released.set()

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        self._engine.submit(transfer_id, copy)

    def poll(self) -> list[CopyResult]:
        return self._engine.poll() if self._is_released.is_set() else []

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        return self._engine.wait(timeout_s) if self._is_released.wait(timeout_s) else []

    def take_copy_times(self) -> list[CopyTime]:
        return self._engine.take_copy_times()

    def close(self) -> None:
        self._engine.close()
