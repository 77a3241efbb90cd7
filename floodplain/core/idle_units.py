"""Units of memory that have been unused for so long that their pages can be returned to the system.

A unit is the smallest part that can be returned: a quantum of the KV pool, a slot of swap space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class IdleUnits:
    """Units whose use has ended, the longest ago first. Pure: the caller has the clock, and the pages.

    A unit is due ``idle_s`` seconds after its last use; the ``num_kept`` last used ones never are.
    """

    def __init__(self, idle_s: float, num_kept: int = 0) -> None:
        self.idle_s = idle_s
        self.num_kept = num_kept
        self._ended_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._ended_s)

    def note_ended(self, units: Iterable[int], now_s: float) -> None:
        """Note that a use of these units ended about now. Other uses of them may go on."""
        for unit in units:
            self._ended_s.pop(unit, None)
            self._ended_s[unit] = now_s

    def take_due(self, now_s: float) -> Iterator[int]:
        """Yield and remove units that are due; those that are not consumed stay due.

        A caller skips units that are in use again: their end will be noted.
        """
        while len(self._ended_s) > self.num_kept:
            unit = next(iter(self._ended_s))
            if now_s - self._ended_s[unit] < self.idle_s:
                return
            del self._ended_s[unit]
            yield unit
