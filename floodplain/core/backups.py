"""Backups: copies of block contents in swap space, keyed by content, so that a shared prefix is saved once.

A backup is *whole* only after its copy was committed; a lost one is never found again. After the last sequence releases
it, a whole one stays for later requests with the same prefix until its slot is needed (AQUA, section 8).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from math import inf

from floodplain.core.changes import ChangeLog
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import IdleBackups, Pin
from floodplain.core.tiers import Location, SlotLedger, Tier


class Backup:
    """One copy of one block's content.

    ``is_private``: only one sequence can have the content, so it is not retained. ``is_moving``: being copied to a slot
    of another tier; it can be read meanwhile. ``num_keepers`` counts sequences, ``num_readers`` inbound copies.
    """

    __slots__ = ("is_lost", "is_moving", "is_private", "is_whole", "key", "location", "num_keepers", "num_readers")

    def __init__(self, key: BlockKey, location: Location) -> None:
        self.key = key
        self.location = location
        self.is_private = False
        self.is_whole = self.is_lost = self.is_moving = False
        self.num_keepers = self.num_readers = 0


class BackupTable:
    """Owner of all backups and swap slots. ``retains``: whole backups stay after the last sequence's release."""

    def __init__(self, slots: Iterable[SlotLedger] = (), *, retains: bool = True) -> None:
        self.slots: dict[Tier, SlotLedger] = {ledger.tier: ledger for ledger in slots}
        self.changed_keys: ChangeLog[BlockKey] = ChangeLog()
        """Contents whose whole backup appeared or vanished, or whose copies in began or ended."""
        self._retains = retains
        self._by_key: dict[BlockKey, Backup] = {}
        self.idle: IdleBackups[Backup] = IdleBackups(self.slots)
        """Backups that can be evicted, and which of them are pinned."""
        self._writing: set[Backup] = set()
        self._unfound: set[Backup] = set()  # lost, with a copy that still touches the slot
        self._moving_to: dict[Backup, Location] = {}

    def num_available(self, tier: Tier) -> int:
        """Slots that ``begin_write`` can still allocate: free ones and those of idle backups."""
        return self.slots[tier].num_free + self.idle.count(tier)

    @property
    def num_unpinned(self) -> int:
        """Slots of all tiers that are free, or whose idle backups are not pinned."""
        return sum(slots.num_free + len(self.idle.unpinned(tier)) for tier, slots in self.slots.items())

    def num_idle(self, tier: Tier) -> int:
        """Whole backups that no sequence keeps."""
        return self.idle.count(tier)

    @property
    def is_needed(self) -> bool:
        """Whether a sequence keeps any backup, or a copy touches one."""
        return any(slots.num_taken > self.idle.count(tier) for tier, slots in self.slots.items())

    def kept_slots(self, tier: Tier) -> set[int]:
        """The taken slots, without those of unpinned idle backups. Takes time linear in the taken slots."""
        return set(self.slots[tier].taken) - {backup.location.slot for backup in self.idle.unpinned(tier)}

    @property
    def is_at_rest(self) -> bool:
        """Whether no sequence keeps a backup and no copy touches one."""
        return all(self.num_available(tier) == slots.num_slots for tier, slots in self.slots.items())

    def find(self, key: BlockKey) -> Backup | None:
        """The backup of a content, whole or still being written; None if there is none."""
        return self._by_key.get(key)

    def find_whole(self, key: BlockKey) -> Backup | None:
        """The backup of a content if it can be restored now."""
        backup = self._by_key.get(key)
        return backup if backup is not None and backup.is_whole else None

    def begin_write(self, tier: Tier, keys: Sequence[BlockKey], below: float = inf) -> list[Backup] | None:
        """Allocate a slot in ``tier`` for each content, none of which has a backup, evicting idle backups.

        None if too few. Contents of pins of at least the worth ``below`` are not evicted; by default, any may be.
        """
        locations = self._take_slots(tier, len(keys), below)
        if locations is None:
            return None
        backups = [Backup(key, location) for key, location in zip(keys, locations, strict=True)]
        for backup in backups:
            if backup.key in self._by_key:
                raise InvariantError("a content is backed up twice")
            self._by_key[backup.key] = backup
        self._writing.update(backups)
        return backups

    def begin_write_from(self, tier: Tier, keys: Sequence[BlockKey]) -> list[Backup] | None:
        """As ``begin_write``, but contents for which ``tier`` has no slot go to other tiers."""
        tiers = [tier, *(other for other in self.slots if other is not tier)]
        if len(keys) > sum(self.num_available(one) for one in tiers):
            return None
        backups: list[Backup] = []
        for one in tiers:
            num_blocks = min(len(keys) - len(backups), self.num_available(one))
            backups += self.begin_write(one, keys[len(backups) :][:num_blocks]) or []
        return backups

    def commit_write(self, backups: Iterable[Backup]) -> None:
        """Mark backups as whole after their outbound copy; a lost one stays lost."""
        for backup in backups:
            self._writing.remove(backup)
            backup.is_whole = not backup.is_lost
            self.changed_keys.add(backup.key)
            self._collect(backup)

    def abort_write(self, backups: Iterable[Backup]) -> None:
        """Remove backups whose outbound copy failed."""
        for backup in backups:
            self._writing.remove(backup)
            self.lose(backup)

    def begin_read(self, backups: Iterable[Backup]) -> None:
        """Note that an inbound copy begins to read these whole backups."""
        for backup in backups:
            if not backup.is_whole:
                raise InvariantError("a backup is read before it is whole")
            self.idle.discard(backup)
            backup.num_readers += 1
            self.changed_keys.add(backup.key)

    def finish_read(self, backups: Iterable[Backup]) -> None:
        """Note that an inbound copy of these backups has ended, successfully or not."""
        for backup in backups:
            backup.num_readers -= 1
            self.changed_keys.add(backup.key)
            self._collect(backup)

    def keep(self, backup: Backup) -> None:
        """Add a sequence that needs the backup."""
        self.idle.discard(backup)
        backup.num_keepers += 1

    def release(self, backup: Backup) -> None:
        """Remove a sequence that needed the backup; after the last one it is idle, or its slot is freed."""
        backup.num_keepers -= 1
        self._collect(backup)

    def lose(self, backup: Backup) -> None:
        """Mark a backup as unusable: lookups miss it at once; its slot is freed when no copy touches it."""
        if not backup.is_lost:
            self.idle.discard(backup)
            backup.is_lost, backup.is_whole = True, False
            del self._by_key[backup.key]
            self.changed_keys.add(backup.key)
            self._unfound.add(backup)
        self._collect(backup)

    # -- pins ----------------------------------------------------------------------------------------------------------

    def pin(self, pin: Pin) -> None:
        """Pin contents: while their backups are idle, they are evicted after unpinned ones."""
        self.idle.pin(pin, sum(slots.num_slots for slots in self.slots.values()))

    def unpin(self, pin: Pin) -> None:
        """Remove a pin; no-op if it was given up already."""
        self.idle.unpin(pin)

    # -- slots that come and go --------------------------------------------------------------------------------------

    def add_slots(self, tier: Tier, slots: Iterable[int]) -> None:
        """Add slots to a tier."""
        self.slots[tier].add(slots)

    def retire_slots(self, tier: Tier, slots: Collection[int]) -> None:
        """Remove slots: free ones and those of idle backups at once, the others when they are freed."""
        self.slots[tier].retire(slots)
        for backup in [backup for backup in self.idle.in_tier(tier) if backup.location.slot in slots]:
            self._forget(backup)

    def empty_slots(self, tier: Tier, slots: Collection[int]) -> list[int]:
        """Drop unpinned idle backups in these slots; return those of the slots that are free then, ascending."""
        wanted = set(slots)
        for backup in [backup for backup in self.idle.unpinned(tier) if backup.location.slot in wanted]:
            self._forget(backup)
        return sorted(wanted - self.slots[tier].taken)

    def in_slots(self, tier: Tier, slots: Container[int]) -> list[Backup]:
        """Backups in these slots of a tier, or being written there, without lost ones."""
        return [
            backup for backup in self._by_key.values() if backup.location.tier is tier and backup.location.slot in slots
        ]

    def begin_move(self, backups: Sequence[Backup], tier: Tier) -> list[Location] | None:
        """Allocate slots in another tier for copies of whole, unmoved backups, in order; None if there are too few."""
        if any(backup.is_moving or not backup.is_whole for backup in backups):
            raise InvariantError("a backup is moved that is not whole, or moves already")
        for backup in backups:
            self.idle.discard(backup)
        locations = self._take_slots(tier, len(backups))
        if locations is None:
            for backup in backups:
                self._collect(backup)
            return None
        for backup, location in zip(backups, locations, strict=True):
            backup.is_moving, self._moving_to[backup] = True, location
        return locations

    def finish_move(self, backup: Backup, ok: bool) -> bool:
        """Finish a move; True if the backup has its new slot. False if readers use the old one: retry.

        If the copy did not arrive whole (``ok`` is False) the backup is lost, since its source may be corrupt, too.
        """
        target = self._moving_to.pop(backup)
        backup.is_moving = False
        has_moved = ok and not backup.is_lost and not backup.num_readers
        if has_moved:
            target, backup.location = backup.location, target
        self.slots[target.tier].free(target)
        if ok:
            self._collect(backup)
        else:
            self.lose(backup)
        return has_moved

    def check_integrity(self) -> None:
        """Raise InvariantError unless every taken slot belongs to exactly one backup and counters are consistent."""
        held = [*self._by_key.values(), *self._unfound]
        self.idle.check_integrity()
        for tier, ledger in self.slots.items():
            ledger.check_integrity()
            slots = {b.location.slot for b in held if b.location.tier is tier}
            slots |= {location.slot for location in self._moving_to.values() if location.tier is tier}
            if len(slots) != ledger.num_taken:
                raise InvariantError(f"{tier}: {ledger.num_taken} slots taken, {len(slots)} backups")
        if any(b.num_keepers < 0 or b.num_readers < 0 for b in held):
            raise InvariantError("a backup is released more often than kept")
        for backup in held:
            is_idle = not (backup.num_keepers or self._is_touched(backup) or backup.is_lost)
            if is_idle != (backup in self.idle) or (is_idle and not backup.is_whole):
                raise InvariantError("a backup that no sequence keeps is not idle, or one that a sequence keeps is")

    def _take_slots(self, tier: Tier, num_slots: int, below: float = inf) -> list[Location] | None:
        """Allocate slots, evicting idle backups at need (``IdleBackups``); None if too few."""
        if tier not in self.slots or num_slots > self.num_available(tier):
            return None
        while (num_missing := num_slots - self.slots[tier].num_free) > 0:
            victim = self.idle.find_victim(tier, num_missing, below)
            if victim is None:
                return None
            self._forget(victim)
        return self.slots[tier].allocate(num_slots)

    def _is_touched(self, backup: Backup) -> bool:
        return backup.num_readers > 0 or backup.is_moving or backup in self._writing

    def _collect(self, backup: Backup) -> None:
        """If no sequence or copy uses the backup any more, retain it as idle, or free its slot."""
        is_needed = backup.num_keepers > 0 and not backup.is_lost
        if is_needed or self._is_touched(backup):
            return
        if backup.is_lost:
            if backup in self._unfound:
                self._unfound.remove(backup)
                self.slots[backup.location.tier].free(backup.location)
        elif self._is_worth_retaining(backup):
            self.idle.add(backup)
            self.slots[backup.location.tier].settled.add(backup.location.slot)
        else:
            self._forget(backup)

    def _is_worth_retaining(self, backup: Backup) -> bool:
        is_leaving = self.slots[backup.location.tier].is_leaving(backup.location)
        return self._retains and backup.is_whole and not backup.is_private and not is_leaving

    def _forget(self, backup: Backup) -> None:
        self.idle.discard(backup)
        del self._by_key[backup.key]
        self.changed_keys.add(backup.key)
        backup.is_lost, backup.is_whole = True, False
        self.slots[backup.location.tier].free(backup.location)
