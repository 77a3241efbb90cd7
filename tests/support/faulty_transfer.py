"""A transfer engine whose copies fail when a test says so."""

from __future__ import annotations

from collections.abc import Sequence

from floodplain.memory.transfer import BlockCopy, CopyResult, LinkUse, TransferEngine


class FaultyTransferEngine:
    """A decorator: the n-th copies (from 0) fail without moving anything.

    Args:
        engine: Does the others.
        failing: Which ones fail.
    """

    def __init__(self, engine: TransferEngine, failing: Sequence[int]) -> None:
        self._engine = engine
        self._failing = frozenset(failing)
        self._num_submitted = 0
        self._failed: list[CopyResult] = []

    @property
    def num_in_flight(self) -> int:
        """See ``TransferEngine``."""
        return self._engine.num_in_flight + len(self._failed)

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """See ``TransferEngine``."""
        if self._num_submitted in self._failing:
            self._failed.append(CopyResult(transfer_id, False, 0, problem="injected fault"))
        else:
            self._engine.submit(transfer_id, copy)
        self._num_submitted += 1

    def poll(self) -> list[CopyResult]:
        """See ``TransferEngine``."""
        failed, self._failed = self._failed, []
        return failed + self._engine.poll()

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """See ``TransferEngine``."""
        return self.poll() or self._engine.wait(timeout_s)

    def take_link_uses(self) -> list[LinkUse]:
        """See ``TransferEngine``."""
        return self._engine.take_link_uses()

    def close(self) -> None:
        """See ``TransferEngine``."""
        self._engine.close()
