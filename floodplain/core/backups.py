"""Which block contents have a copy in swap space.

Backups are keyed by content, so a prefix that many sequences share is saved and restored once. A backup lives as long
as a sequence keeps it; it is *whole* only after its copy was committed, and once lost it is never an answer again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import Location, SlotLedger, Tier


class Backup:
    """One copy of one block's content.

    Attributes:
        key: The content.
        location: Its slot.
        is_whole: Whether the copy was committed.
        is_lost: Whether it turned out to be unusable; nobody finds it any more.
        num_keepers: Sequences that keep it.
        num_readers: Inbound copies that read it.
    """

    __slots__ = ("is_lost", "is_whole", "key", "location", "num_keepers", "num_readers")

    def __init__(self, key: BlockKey, location: Location) -> None:
        self.key = key
        self.location = location
        self.is_whole = self.is_lost = False
        self.num_keepers = self.num_readers = 0


class BackupTable:
    """Owner of all backups and of the slots of every swap tier."""

    def __init__(self, slots: Iterable[SlotLedger] = ()) -> None:
        self.slots: dict[Tier, SlotLedger] = {ledger.tier: ledger for ledger in slots}
        self.changed_keys: set[BlockKey] = set()
        """Contents whose whole backup appeared or vanished, until a reader clears it."""
        self._by_key: dict[BlockKey, Backup] = {}
        self._writing: set[Backup] = set()
        self._unfound: set[Backup] = set()  # lost, with a reader or writer that still touches the slot

    def find(self, key: BlockKey) -> Backup | None:
        """The backup of a content, whole or still being written; None if there is none."""
        return self._by_key.get(key)

    def find_whole(self, key: BlockKey) -> Backup | None:
        """The backup of a content if it can be restored now."""
        backup = self._by_key.get(key)
        return backup if backup is not None and backup.is_whole else None

    def begin_write(self, tier: Tier, keys: Sequence[BlockKey]) -> list[Backup] | None:
        """Reserve a slot in ``tier`` for each content that has no backup yet; None if there are too few."""
        locations = self.slots[tier].allocate(len(keys)) if tier in self.slots else None
        if locations is None:
            return None
        backups = [Backup(key, location) for key, location in zip(keys, locations, strict=True)]
        for backup in backups:
            if backup.key in self._by_key:
                raise InvariantError("a content is backed up twice")
            self._by_key[backup.key] = backup
        self._writing.update(backups)
        return backups

    def commit_write(self, backups: Iterable[Backup]) -> None:
        """The outbound copy arrived: these backups are whole."""
        for backup in backups:
            self._writing.remove(backup)
            backup.is_whole = not backup.is_lost
            self.changed_keys.add(backup.key)
            self._collect(backup)

    def abort_write(self, backups: Iterable[Backup]) -> None:
        """The outbound copy failed: these backups never existed."""
        for backup in backups:
            self._writing.remove(backup)
            self.lose(backup)

    def begin_read(self, backups: Iterable[Backup]) -> None:
        """An inbound copy reads these whole backups."""
        for backup in backups:
            if not backup.is_whole:
                raise InvariantError("a backup is read before it is whole")
            backup.num_readers += 1

    def finish_read(self, backups: Iterable[Backup]) -> None:
        """The inbound copy is done with them, well or not."""
        for backup in backups:
            backup.num_readers -= 1
            self._collect(backup)

    def keep(self, backup: Backup) -> None:
        """One more sequence needs it."""
        backup.num_keepers += 1

    def release(self, backup: Backup) -> None:
        """One sequence less needs it; the last one frees its slot."""
        backup.num_keepers -= 1
        self._collect(backup)

    def lose(self, backup: Backup) -> None:
        """Its bytes cannot be trusted: from now on it is a miss, and its slot is free when no copy touches it."""
        if not backup.is_lost:
            backup.is_lost, backup.is_whole = True, False
            del self._by_key[backup.key]
            self.changed_keys.add(backup.key)
            self._unfound.add(backup)
        self._collect(backup)

    def check_integrity(self) -> None:
        """Every slot belongs to exactly one backup; counters are sane.

        Raises:
            InvariantError: They are not.
        """
        held = [*self._by_key.values(), *self._unfound]
        for tier, ledger in self.slots.items():
            ledger.check_integrity()
            slots = {b.location.slot for b in held if b.location.tier is tier}
            if len(slots) != ledger.num_slots - ledger.num_free:
                raise InvariantError(f"{tier}: {ledger.num_slots - ledger.num_free} slots taken, {len(slots)} backups")
        if any(b.num_keepers < 0 or b.num_readers < 0 for b in held):
            raise InvariantError("a backup is released more often than kept")

    def _collect(self, backup: Backup) -> None:
        """Free the slot if nobody needs the backup and no copy touches it."""
        is_needed = backup.num_keepers > 0 and not backup.is_lost
        if is_needed or backup.num_readers or backup in self._writing:
            return
        if backup.is_lost:
            if backup not in self._unfound:
                return
            self._unfound.remove(backup)
        else:
            del self._by_key[backup.key]
            self.changed_keys.add(backup.key)
            backup.is_lost = True
        backup.is_whole = False
        self.slots[backup.location.tier].free(backup.location)
