"""Slots that come and go with leases, and what lies in them: copied to another tier, dropped, or brought nearer.

Whoever has the leases calls this at an iteration boundary, and has the copies made; each is answered by ``settle``.
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
"""What comes nearer leaves this part of the tier's slots to those that leave the device."""


class Keeper(Protocol):
    """Who keeps backups: our loop's state, or the books of an engine that is not ours."""

    @property
    def backups(self) -> BackupTable:
        """All of them."""

    def is_on_device(self, backup: Backup) -> bool:
        """Whether the device has the same content, so that nothing is lost with this copy."""

    def swapped_backups(self) -> Iterable[Iterable[Backup]]:
        """What each sequence keeps that waits in swap space, whoever comes back first in front."""

    def drop_lost(self, lost: tuple[Backup, ...]) -> None:
        """Nobody keeps these any more."""


class Relocations:
    """See the module.

    Args:
        keeper: Of what lies in the slots.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._numbers = count(1)
        self._in_flight: dict[int, list[Backup]] = {}

    @property
    def num_in_flight(self) -> int:
        """Relocations that were not answered."""
        return len(self._in_flight)

    @property
    def is_needed(self) -> bool:
        """Whether anything in swap space is needed by a sequence, or is being copied."""
        backups = self._keeper.backups
        return any(backups.num_kept(tier) for tier in backups.slots)

    def num_available(self, tier: Tier) -> int:
        """Slots in which nothing lies, or only what nobody needs."""
        return self._keeper.backups.num_available(tier)

    def kept_slots(self, tier: Tier) -> set[int]:
        """The other ones. Takes as long as there are."""
        return self._keeper.backups.kept_slots(tier)

    def add_slots(self, tier: Tier, slots: Iterable[int]) -> None:
        """A lease was allocated: there is more room."""
        self._keeper.backups.add_slots(tier, slots)

    def retire_slots(self, tier: Tier, slots: Collection[int]) -> None:
        """A lease goes: nothing new is written to its slots, and prefixes there that nobody keeps are forgotten."""
        self._keeper.backups.retire_slots(tier, slots)

    def count_taken(self, tier: Tier, slots: Collection[int]) -> int:
        """Slots in which something lies, or is being copied; when there are none, their memory may go."""
        return self._keeper.backups.slots[tier].count_taken(slots)

    def evacuate(self, tier: Tier, slots: Collection[int], target: Tier, most: int) -> Relocation | None:
        """Begin to copy up to ``most`` blocks from slots that go to another tier; None if there is nothing to copy now.

        What is on the device too is dropped instead, and so is what finds no room: it is computed again. What a copy
        reads or writes at this moment is left for the next call.
        """
        backups = self._keeper.backups
        there = [backup for backup in backups.in_slots(tier, slots) if self._is_at_rest(backup)]
        spare = [backup for backup in there if self._keeper.is_on_device(backup)]
        needed = [backup for backup in there if not self._keeper.is_on_device(backup)]
        num_moving = min(most, len(needed), backups.num_available(target))
        self._lose(spare if num_moving or not needed else there)
        return self._begin(needed[:num_moving], target) if num_moving else None

    def bring_nearer(self, tier: Tier, target: Tier, most: int) -> Relocation | None:
        """Begin to copy up to ``most`` blocks of swapped sequences to a nearer tier that has slots to spare."""
        slots = self._keeper.backups.slots
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
        """The memory of these slots is gone: what lay there is a miss. Copies that are under way there fail alone."""
        self._lose(self._keeper.backups.in_slots(tier, slots))

    def settle(self, relocation_id: int, lost: Sequence[int]) -> None:
        """A relocation ended; blocks at the places ``lost`` did not arrive whole, and are misses.

        Raises:
            InvariantError: It was not in flight.
        """
        moving = self._in_flight.pop(relocation_id, None)
        if moving is None:
            raise InvariantError(f"relocation {relocation_id} is answered but not in flight")
        gone = set(lost)
        for place, backup in enumerate(moving):
            self._keeper.backups.finish_move(backup, place not in gone)
        self._keeper.drop_lost(tuple(backup for backup in moving if backup.is_lost))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_at_rest(self, backup: Backup) -> bool:
        return backup.is_whole and not backup.num_readers and not backup.is_moving

    def _begin(self, moving: list[Backup], target: Tier) -> Relocation:
        sources = tuple(backup.location for backup in moving)
        targets = self._keeper.backups.begin_move(moving, target)
        if targets is None:
            raise InvariantError(f"{len(moving)} blocks shall go to {target}, which has fewer slots")
        relocation_id = next(self._numbers)
        self._in_flight[relocation_id] = moving
        return Relocation(relocation_id, sources, tuple(targets))

    def _lose(self, lost: list[Backup]) -> None:
        for backup in lost:
            self._keeper.backups.lose(backup)
        if lost:
            self._keeper.drop_lost(tuple(lost))
