"""LRU, the baseline of pins: KV of ended requests is copied as with pins, the least recently used is evicted."""

from __future__ import annotations

from collections.abc import Sequence

from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import Pin
from floodplain.runtime.sessions import SessionBook


class AgeOnly(SessionBook):
    """Has the KV of ended requests copied as with pins, and evicts the least recently used."""

    def end(self, number: int, keys: Sequence[BlockKey], now: float, least_chance: float = 0.0) -> Pin | None:
        """As of the base class, but the contents are not pinned, and take any idle slot."""
        pin = super().end(number, keys, now, least_chance)
        if pin is None:
            return None
        self._unpin(self._sessions[number])
        self._note_use(keys)
        return Pin(keys, pin.tenant, float("inf"))

    def _note_use(self, keys: Sequence[BlockKey]) -> None:
        """Make the copies that there are the most recently used ones; the end of a pin made them the next victims."""
        for key in reversed(keys):  # of a prefix, the last block is evicted first
            backup = self._backups.find_whole(key)
            if backup is not None:
                self._backups.keep(backup)
                self._backups.release(backup)
