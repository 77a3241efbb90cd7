"""Returns physical memory that no request uses to the system: of the KV pool, of swap space, and of the heap.

The pool keeps its blocks and its owned pages, swap space its slots; cached prefixes in them are dropped. A *unit* is
the smallest part that can be returned: a quantum of the KV pool, a slot of swap space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.tiers import Tier
from floodplain.memory.host.libc import trim_heap
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots


class IdleUnits:
    """Units whose use has ended, the longest ago first, due after ``idle_s``; the ``num_kept`` last used never are."""

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
        """Yield and remove due units; a caller skips those in use again, whose end will be noted."""
        while len(self._ended_s) > self.num_kept:
            unit = next(iter(self._ended_s))
            if now_s - self._ended_s[unit] < self.idle_s:
                return
            del self._ended_s[unit]
            yield unit


LOOK_S = 0.5
"""Seconds between two looks, and so the resolution of idle times."""
BUSY_BYTES, REST_BYTES = 2**23, 2**28
"""Most bytes returned in one look, while requests are live and at rest: 1 ms of the step loop, and tens of ms."""
KEPT_SHARE = 16
"""One part in so many of the pool, the last used, is kept: prefixes of a chat stay, and next steps do not fault."""


class IdleMemory:
    """Returns memory at step boundaries after ``idle_s`` seconds without use, and at once what building touched.

    The pool's device must be one whose pages take memory when they are written.
    """

    def __init__(
        self,
        pool: KVPool,
        ledger: BlockLedger,
        slots: SwapSlots | None,
        backups: BackupTable,
        idle_s: float,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._pool, self._ledger, self._slots, self._backups = pool, ledger, slots, backups
        self._idle_s, self._trim = idle_s, trim
        self._freed_quanta = IdleUnits(idle_s, len(pool.quanta) // KEPT_SHARE)
        self._freed_slots = IdleUnits(idle_s)
        self._look_s = self._busy_s = float("-inf")
        self._is_trimmed = False
        pool.discard_quanta(pool.quanta)  # written when links were measured
        if slots is not None:
            slots.discard(range(slots.num_slots))
        trim()

    def look(self, now_s: float, *, is_busy: bool) -> None:
        """Return memory that is due, unless the last look is less than ``LOOK_S`` ago; less of it if busy."""
        if now_s - self._look_s < LOOK_S:
            return
        self._look_s = now_s
        self._note_ends(now_s)
        most_bytes = BUSY_BYTES if is_busy else REST_BYTES
        self._return_quanta(now_s, max(1, most_bytes // self._pool.quantum_bytes))
        self._return_slots(now_s, max(1, most_bytes // self._pool.layout.block_bytes))
        self._trim_at_rest(now_s, is_busy=is_busy)

    def _note_ends(self, now_s: float) -> None:
        self._freed_quanta.note_ended(self._ledger.settled_quanta, now_s)
        self._ledger.settled_quanta.clear()
        if self._slots is not None:
            settled = self._backups.slots[Tier.HOST].settled
            self._freed_slots.note_ended(settled, now_s)
            settled.clear()

    def _return_quanta(self, now_s: float, most: int) -> None:
        due = islice(self._freed_quanta.take_due(now_s), most)
        free = [quantum for quantum in due if self._ledger.empty_quantum(quantum)]
        if free:
            self._pool.discard_quanta(sorted(free))

    def _return_slots(self, now_s: float, most: int) -> None:
        if self._slots is None:
            return
        due = list(islice(self._freed_slots.take_due(now_s), most))
        free = self._backups.empty_slots(Tier.HOST, due)
        if free:
            self._slots.discard(free)
            self._backups.slots[Tier.HOST].settled.difference_update(free)

    def _trim_at_rest(self, now_s: float, *, is_busy: bool) -> None:
        if is_busy:
            self._busy_s, self._is_trimmed = now_s, False
        elif not self._is_trimmed and now_s - self._busy_s >= self._idle_s:
            self._trim()
            self._is_trimmed = True
