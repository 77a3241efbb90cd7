"""Which block contents have a copy in swap space.

Backups are keyed by content, so a prefix that many sequences share is saved and restored once. A backup is *whole* only
after its copy was committed, and once lost it is never an answer again. It is *kept* as long as a sequence needs it;
after that, a whole one stays for later requests with the same prefix until its slot is needed (AQUA, section 8).
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
        is_private: Whether its content is one sequence's own, so that nobody else can ever ask for it.
        is_whole: Whether the copy was committed.
        is_lost: Whether it turned out to be unusable; nobody finds it any more.
        num_keepers: Sequences that keep it.
        num_readers: Inbound copies that read it.
    """

    __slots__ = ("is_lost", "is_private", "is_whole", "key", "location", "num_keepers", "num_readers")

    def __init__(self, key: BlockKey, location: Location) -> None:
        self.key = key
        self.location = location
        self.is_private = False
        self.is_whole = self.is_lost = False
        self.num_keepers = self.num_readers = 0


class BackupTable:
    """Owner of all backups and of the slots of every swap tier.

    Args:
        slots: Of each tier.
        retains: Whether whole backups stay when nobody keeps them any more.
    """

    def __init__(self, slots: Iterable[SlotLedger] = (), *, retains: bool = True) -> None:
        self.slots: dict[Tier, SlotLedger] = {ledger.tier: ledger for ledger in slots}
        self.changed_keys: set[BlockKey] = set()
        """Contents whose whole backup appeared or vanished, or whose copies in began or ended; a reader clears it."""
        self._retains = retains
        self._by_key: dict[BlockKey, Backup] = {}
        self._idle: dict[Tier, dict[Backup, None]] = {tier: {} for tier in self.slots}  # least recently used first
        self._writing: set[Backup] = set()
        self._unfound: set[Backup] = set()  # lost, with a reader or writer that still touches the slot

    def num_available(self, tier: Tier) -> int:
        """Slots that ``begin_write`` can still give: the free ones and, by forgetting, those of idle backups."""
        return self.slots[tier].num_free + len(self._idle[tier])

    def num_idle(self, tier: Tier) -> int:
        """Whole backups that nobody keeps."""
        return len(self._idle[tier])

    @property
    def is_at_rest(self) -> bool:
        """Whether nobody keeps a backup and no copy touches one."""
        return all(self.num_available(tier) == slots.num_slots for tier, slots in self.slots.items())

    def find(self, key: BlockKey) -> Backup | None:
        """The backup of a content, whole or still being written; None if there is none."""
        return self._by_key.get(key)

    def find_whole(self, key: BlockKey) -> Backup | None:
        """The backup of a content if it can be restored now."""
        backup = self._by_key.get(key)
        return backup if backup is not None and backup.is_whole else None

    def begin_write(self, tier: Tier, keys: Sequence[BlockKey]) -> list[Backup] | None:
        """Reserve a slot in ``tier`` for each content that has no backup yet; None if there are too few.

        Idle backups make room, the least recently used first.
        """
        if tier not in self.slots or len(keys) > self.num_available(tier):
            return None
        while self.slots[tier].num_free < len(keys):
            self._forget(next(iter(self._idle[tier])))
        locations = self.slots[tier].allocate(len(keys)) or []
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
            self._wake(backup)
            backup.num_readers += 1
            self.changed_keys.add(backup.key)

    def finish_read(self, backups: Iterable[Backup]) -> None:
        """The inbound copy is done with them, well or not."""
        for backup in backups:
            backup.num_readers -= 1
            self.changed_keys.add(backup.key)
            self._collect(backup)

    def keep(self, backup: Backup) -> None:
        """One more sequence needs it."""
        self._wake(backup)
        backup.num_keepers += 1

    def release(self, backup: Backup) -> None:
        """One sequence less needs it; when the last one does, it is idle, or its slot is free."""
        backup.num_keepers -= 1
        self._collect(backup)

    def lose(self, backup: Backup) -> None:
        """Its bytes cannot be trusted: from now on it is a miss, and its slot is free when no copy touches it."""
        if not backup.is_lost:
            self._wake(backup)
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
        for backup in held:
            is_idle = not (backup.num_keepers or backup.num_readers or backup in self._writing or backup.is_lost)
            if is_idle != (backup in self._idle[backup.location.tier]) or (is_idle and not backup.is_whole):
                raise InvariantError("a backup that nobody keeps is not idle, or one that somebody keeps is")

    def _wake(self, backup: Backup) -> None:
        self._idle[backup.location.tier].pop(backup, None)

    def _collect(self, backup: Backup) -> None:
        """Nobody may need the backup any more: retain it for later, or free its slot when no copy touches it."""
        is_needed = backup.num_keepers > 0 and not backup.is_lost
        if is_needed or backup.num_readers or backup in self._writing:
            return
        if backup.is_lost:
            if backup in self._unfound:
                self._unfound.remove(backup)
                self.slots[backup.location.tier].free(backup.location)
        elif self._retains and backup.is_whole and not backup.is_private:
            self._idle[backup.location.tier][backup] = None
        else:
            self._forget(backup)

    def _forget(self, backup: Backup) -> None:
        """From now on it is a miss, and its slot is free. No copy touches it."""
        self._wake(backup)
        del self._by_key[backup.key]
        self.changed_keys.add(backup.key)
        backup.is_lost, backup.is_whole = True, False
        self.slots[backup.location.tier].free(backup.location)
