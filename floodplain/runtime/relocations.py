"""Relocations: copies of backups between tiers of swap space, as leases add and remove slots.

The owner of the leases calls this at an iteration boundary, and has the copies made; ``settle`` ends each copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import Protocol

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.errors import InvariantError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import Tier

SPARE_PART = 4
"""One part in so many of the nearer tier's slots stays free for swap-outs when backups are promoted."""


class Keeper(Protocol):
    """Owner of the backups: the loop's state, or the bookkeeping of another engine."""

    @property
    def backups(self) -> BackupTable:
        """All backups."""

    def is_on_device(self, backup: Backup) -> bool:
        """Whether the device has the same content, so that this copy can be dropped without loss."""

    def swapped_backups(self) -> Iterable[Iterable[Backup]]:
        """The kept backups of each swapped sequence, in the order in which sequences are resumed."""

    def drop_lost(self, lost: tuple[Backup, ...]) -> None:
        """Release lost backups from all sequences that keep them."""


class Relocations:
    """Begins relocations of the keeper's backups, and settles them."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._numbers = count(1)
        self._in_flight: dict[int, list[Backup]] = {}

    @property
    def num_in_flight(self) -> int:
        """Relocations that are not settled."""
        return len(self._in_flight)

    @property
    def backups(self) -> BackupTable:
        """The keeper's backups, with the slots that leases add and retire."""
        return self._keeper.backups

    def evacuate(self, tier: Tier, slots: Collection[int], target: Tier, most: int) -> Relocation | None:
        """Begin to copy up to ``most`` blocks from these slots to another tier; None if none can be copied now.

        Blocks that the device has, too, are dropped; all, if ``target`` has no free slot. Backups that a copy reads or
        writes now are left for the next call.
        """
        backups = self.backups
        there = [backup for backup in backups.in_slots(tier, slots) if self._is_at_rest(backup)]
        spare = [backup for backup in there if self._keeper.is_on_device(backup)]
        needed = [backup for backup in there if not self._keeper.is_on_device(backup)]
        num_moving = min(most, len(needed), backups.num_available(target))
        self._lose(spare if num_moving or not needed else there)
        return self._begin(needed[:num_moving], target) if num_moving else None

    def bring_nearer(self, tier: Tier, target: Tier, most: int) -> Relocation | None:
        """Begin to promote up to ``most`` blocks of swapped sequences to a nearer tier; None if none can be."""
        slots = self.backups.slots
        near = slots[target]
        most = min(most, near.num_free - near.num_slots // SPARE_PART)
        if most <= 0 or not slots[tier].num_taken:
            return None
        found: list[Backup] = []
        for kept in self._keeper.swapped_backups():
            found += [b for b in kept if b.location.tier is tier and self._is_at_rest(b) and b not in found]
            if len(found) >= most:
                break
        return self._begin(found[:most], target) if found else None

    def abandon(self, tier: Tier, slots: Collection[int]) -> None:
        """Mark backups in these slots as lost: their memory is gone. Copies in flight there fail."""
        self._lose(self.backups.in_slots(tier, slots))

    def settle(self, relocation_id: int, lost: Sequence[int]) -> None:
        """End a relocation; backups at the places ``lost`` are lost. InvariantError if it is not in flight."""
        moving = self._in_flight.pop(relocation_id, None)
        if moving is None:
            raise InvariantError(f"relocation {relocation_id} is answered but not in flight")
        gone = set(lost)
        for place, backup in enumerate(moving):
            self.backups.finish_move(backup, place not in gone)
        self._keeper.drop_lost(tuple(backup for backup in moving if backup.is_lost))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_at_rest(self, backup: Backup) -> bool:
        return backup.is_whole and not backup.num_readers and not backup.is_moving

    def _begin(self, moving: list[Backup], target: Tier) -> Relocation:
        sources = tuple(backup.location for backup in moving)
        targets = self.backups.begin_move(moving, target)
        if targets is None:
            raise InvariantError(f"{len(moving)} blocks shall go to {target}, which has fewer slots")
        relocation_id = next(self._numbers)
        self._in_flight[relocation_id] = moving
        return Relocation(relocation_id, sources, tuple(targets))

    def _lose(self, lost: list[Backup]) -> None:
        for backup in lost:
            self.backups.lose(backup)
        if lost:
            self._keeper.drop_lost(tuple(lost))
