"""What pins are compared with: KV of ended requests is copied as with pins, and evicted by age alone."""

from __future__ import annotations

from collections.abc import Sequence

from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import Pin
from floodplain.runtime.sessions import SessionBook


class AgeOnly(SessionBook):
    """Has the KV of ended requests copied as with pins, and evicted by age alone."""

    def end(self, number: int, keys: Sequence[BlockKey], now: float, least_chance: float = 0.0) -> Pin | None:
        """As of the base class, but the contents are not pinned, and take any idle slot."""
        pin = super().end(number, keys, now, least_chance)
        if pin is None:
            return None
        self._unpin(self._sessions[number])
        return Pin(keys, pin.tenant, float("inf"))
