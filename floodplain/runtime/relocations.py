"""Slots that come and go with leases, and what lies in them: copied to another tier, dropped, or brought nearer.

Whoever has the leases calls this at an iteration boundary, and has the copies made; each is answered by ``settle``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import Tier
from floodplain.runtime.state import LoopState

SPARE_PART = 4
"""What comes nearer leaves this part of the tier's slots to those that leave the device."""


class Relocations:
    """See the module.

    Args:
        state: Of the loop.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._numbers = count(1)
        self._in_flight: dict[int, list[Backup]] = {}

    @property
    def num_in_flight(self) -> int:
        """Relocations that were not answered."""
        return len(self._in_flight)

    def add_slots(self, tier: Tier, slots: Iterable[int]) -> None:
        """A lease was allocated: there is more room."""
        self._state.backups.add_slots(tier, slots)

    def retire_slots(self, tier: Tier, slots: Collection[int]) -> None:
        """A lease goes: nothing new is written to its slots, and prefixes there that nobody keeps are forgotten."""
        self._state.backups.retire_slots(tier, slots)

    def count_taken(self, tier: Tier, slots: Collection[int]) -> int:
        """Slots in which something lies, or is being copied; when there are none, their memory may go."""
        return self._state.backups.slots[tier].count_taken(slots)

    def evacuate(self, tier: Tier, slots: Collection[int], target: Tier, most: int) -> Relocation | None:
        """Begin to copy up to ``most`` blocks from slots that go to another tier; None if there is nothing to copy now.

        What is on the device too is dropped instead, and so is what finds no room: it is computed again. What a copy
        reads or writes at this moment is left for the next call.
        """
        backups = self._state.backups
        there = [backup for backup in backups.in_slots(tier, slots) if self._is_at_rest(backup)]
        spare = [backup for backup in there if self._state.ledger.find(backup.key) is not None]
        needed = [backup for backup in there if self._state.ledger.find(backup.key) is None]
        num_moving = min(most, len(needed), backups.num_available(target))
        self._lose(spare if num_moving or not needed else there)
        return self._begin(needed[:num_moving], target) if num_moving else None

    def bring_nearer(self, tier: Tier, target: Tier, most: int) -> Relocation | None:
        """Begin to copy up to ``most`` blocks of swapped sequences to a nearer tier that has slots to spare."""
        slots = self._state.backups.slots
        near = slots[target]
        most = min(most, near.num_free - near.num_slots // SPARE_PART)
        if most <= 0 or not slots[tier].num_taken:
            return None
        found: list[Backup] = []
        for seq in self._state.swapped:
            kept = seq.backups if seq.tail is None else [*seq.backups, seq.tail[0]]
            found += [b for b in kept if b.location.tier is tier and self._is_at_rest(b) and b not in found]
            if len(found) >= most:
                break
        return self._begin(found[:most], target) if found else None

    def abandon(self, tier: Tier, slots: Collection[int]) -> None:
        """The memory of these slots is gone: what lay there is a miss. Copies that are under way there fail alone."""
        self._lose(self._state.backups.in_slots(tier, slots))

    def settle(self, relocation_id: int, arrived: Sequence[bool]) -> None:
        """A relocation ended; for each of its blocks, whether it arrived whole. What did not is lost.

        Raises:
            InvariantError: It was not in flight.
        """
        moving = self._in_flight.pop(relocation_id, None)
        if moving is None:
            raise InvariantError(f"relocation {relocation_id} is answered but not in flight")
        for backup, ok in zip(moving, arrived, strict=True):
            self._state.backups.finish_move(backup, ok)
        self._state.drop_lost(tuple(backup for backup in moving if backup.is_lost))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_at_rest(self, backup: Backup) -> bool:
        return backup.is_whole and not backup.num_readers and not backup.is_moving

    def _begin(self, moving: list[Backup], target: Tier) -> Relocation:
        sources = tuple(backup.location for backup in moving)
        targets = self._state.backups.begin_move(moving, target)
        if targets is None:
            raise InvariantError(f"{len(moving)} blocks shall go to {target}, which has fewer slots")
        relocation_id = next(self._numbers)
        self._in_flight[relocation_id] = moving
        return Relocation(relocation_id, sources, tuple(targets))

    def _lose(self, lost: list[Backup]) -> None:
        for backup in lost:
            self._state.backups.lose(backup)
        if lost:
            self._state.drop_lost(tuple(lost))
