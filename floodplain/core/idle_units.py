"""Which units of memory have been out of use for so long that the system may have their pages back.

A unit is what can go alone: a quantum of the KV pool, a slot of swap space. It may have pages once it was used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class IdleUnits:
    """Units whose use has ended, the longest ago first. Pure: the caller has the clock, and the pages.

    Args:
        idle_s: Seconds without use after which a unit goes.
        num_kept: Of the units that are out of use, so many stay whatever their time: those that were used last.
    """

    def __init__(self, idle_s: float, num_kept: int = 0) -> None:
        self.idle_s = idle_s
        self.num_kept = num_kept
        self._ended_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._ended_s)

    def note_ended(self, units: Iterable[int], now_s: float) -> None:
        """A use of these units ended about now. Other uses of them may go on."""
        for unit in units:
            self._ended_s.pop(unit, None)
            self._ended_s[unit] = now_s

    def take_due(self, now_s: float) -> Iterator[int]:
        """Units whose last use ended ``idle_s`` ago, one by one. They are forgotten until a use of them ends again.

        So a caller that finds one in use lets it be: its end will be noted. What is not taken stays due.
        """
        while len(self._ended_s) > self.num_kept:
            unit = next(iter(self._ended_s))
            if now_s - self._ended_s[unit] < self.idle_s:
                return
            del self._ended_s[unit]
            yield unit
