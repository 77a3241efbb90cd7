"""Backups that no sequence keeps, and the order of their eviction: unpinned ones first, then those of cheap pins.

A *pin* holds the contents of a session that is expected to send its next request. It only orders evictions: every slot
of an idle backup can be taken at any time, so a pin never keeps a live request from being swapped out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from math import inf
from typing import Generic, Protocol, TypeVar

from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import Location, Tier


class Copy(Protocol):
    """A copy of one content in one slot."""

    key: BlockKey
    location: Location


T = TypeVar("T", bound=Copy)


class Pin:
    """Leading contents of one session, in order; the last ones are unpinned first.

    ``worth``: expected returns of the session per second, ``inf`` while its request waits. Blocks are equally long to
    compute, so pins are evicted in the order of their worth. ``tenant``: the API key whose share it counts in.
    """

    __slots__ = ("keys", "tenant", "worth")

    def __init__(self, keys: Iterable[BlockKey], tenant: str = "", worth: float = 0.0) -> None:
        self.keys = list(keys)
        self.tenant = tenant
        self.worth = worth


class IdleBackups(Generic[T]):
    """The idle backups of all tiers, and the pins of their contents.

    While several tenants have pins, each pins at most its equal part of all slots. Shared contents count in each pin.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.pins: dict[Pin, None] = {}
        self.num_unpinned_blocks = 0
        """Contents that pins have given up, under pressure or for a tenant's share, since the start."""
        self.price = 0.0
        """The worth of the pin that last gave up contents under pressure, until a reader clears it."""
        self._loose: dict[Tier, OrderedDict[BlockKey, T]] = {tier: OrderedDict() for tier in tiers}
        self._pinned: dict[BlockKey, T] = {}
        self._num_pinned: Counter[Tier] = Counter()
        self._num_pins: Counter[BlockKey] = Counter()
        self._pinned_by: Counter[str] = Counter()

    def count(self, tier: Tier) -> int:
        """Idle backups of a tier."""
        return len(self._loose[tier]) + self._num_pinned[tier]

    def count_pinned(self, tier: Tier) -> int:
        """Idle backups of a tier that are pinned."""
        return self._num_pinned[tier]

    def __contains__(self, backup: T) -> bool:
        return backup in (self._loose[backup.location.tier].get(backup.key), self._pinned.get(backup.key))

    def unpinned(self, tier: Tier) -> Collection[T]:
        """Unpinned idle backups of a tier, the next victim first."""
        return self._loose[tier].values()

    def in_tier(self, tier: Tier) -> Iterator[T]:
        """Idle backups of a tier: the unpinned ones, the next victim first, then the pinned ones."""
        yield from self.unpinned(tier)
        yield from (backup for backup in self._pinned.values() if backup.location.tier is tier)

    def add(self, backup: T) -> None:
        """Add a backup that has become idle, as the most recently used one."""
        if backup.key in self._num_pins:
            self._pinned[backup.key] = backup
            self._num_pinned[backup.location.tier] += 1
        else:
            self._loose[backup.location.tier][backup.key] = backup

    def discard(self, backup: T) -> None:
        """Remove a backup that is in use again or has no slot any more; no-op if it is not idle."""
        if self._pinned.get(backup.key) is backup:
            del self._pinned[backup.key]
            self._num_pinned[backup.location.tier] -= 1
        elif self._loose[backup.location.tier].get(backup.key) is backup:
            del self._loose[backup.location.tier][backup.key]

    def find_victim(self, tier: Tier, num_blocks: int = 1, below: float = inf) -> T | None:
        """The idle backup of a tier to evict next; None if there is none, or only ones of worthier pins.

        If all are pinned, the cheapest pins give up ``num_blocks`` of their last contents. ``below``: only pins of less
        worth do; ``inf``: all.
        """
        loose = self._loose[tier]
        while not loose and self._num_pinned[tier]:
            pin = min(self.pins, key=lambda pin: pin.worth)
            if below != inf and pin.worth >= below:
                return None
            if pin.worth != inf:
                self.price = pin.worth
            self.shorten(pin, len(pin.keys) - num_blocks)
        return next(iter(loose.values()), None)

    def pin(self, pin: Pin, num_slots: int) -> None:
        """Add a pin. Of ``num_slots``, the slots of all tiers, each tenant with pins has an equal part."""
        if pin in self.pins:
            raise InvariantError("a pin is added twice")
        self.pins[pin] = None
        self._pinned_by[pin.tenant] += len(pin.keys)
        for key in pin.keys:
            self._num_pins[key] += 1
            self._move(key)
        self._keep_to_shares(num_slots)

    def unpin(self, pin: Pin) -> None:
        """Remove a pin; its contents are evicted next, the last one first. No-op if it is not there."""
        if pin in self.pins:
            self._drop(pin, 0)

    def shorten(self, pin: Pin, num_keys: int) -> None:
        """Unpin all but the first ``num_keys`` contents of a pin; without any left, the pin is removed."""
        self.num_unpinned_blocks += len(pin.keys) - max(0, num_keys)
        self._drop(pin, max(0, num_keys))

    def check_integrity(self) -> None:
        """Raise InvariantError unless the counts of pins match the pins."""
        num_pins = Counter(key for pin in self.pins for key in pin.keys)
        num_pinned = Counter(backup.location.tier for backup in self._pinned.values())
        pinned_by = Counter(pin.tenant for pin in self.pins for _ in pin.keys)
        is_sound = num_pins == self._num_pins and +num_pinned == +self._num_pinned and pinned_by == +self._pinned_by
        if not is_sound or not self._pinned.keys() <= num_pins.keys():
            raise InvariantError("the counts of pinned backups do not match the pins")
        if any(key in num_pins for loose in self._loose.values() for key in loose):
            raise InvariantError("an idle backup of a pinned content is evicted as if it were not pinned")

    def _keep_to_shares(self, num_slots: int) -> None:
        tenants = [tenant for tenant, num_blocks in self._pinned_by.items() if num_blocks]
        if len(tenants) < 2:
            return
        share = num_slots // len(tenants)
        for tenant in tenants:
            while (excess := self._pinned_by[tenant] - share) > 0:
                pin = min((pin for pin in self.pins if pin.tenant == tenant), key=lambda pin: pin.worth)
                self.shorten(pin, len(pin.keys) - excess)

    def _drop(self, pin: Pin, num_keys: int) -> None:
        gone = pin.keys[num_keys:]
        del pin.keys[num_keys:]
        self._pinned_by[pin.tenant] -= len(gone)
        if not pin.keys:
            del self.pins[pin]
        for key in gone:
            self._num_pins[key] -= 1
            if not self._num_pins[key]:
                del self._num_pins[key]
                self._move(key)

    def _move(self, key: BlockKey) -> None:
        """Move an idle backup to the side of its pins; an unpinned one is evicted next."""
        if key in self._num_pins:
            backup = next((loose.pop(key) for loose in self._loose.values() if key in loose), None)
            if backup is not None:
                self.add(backup)
        elif (backup := self._pinned.get(key)) is not None:
            self.discard(backup)
            loose = self._loose[backup.location.tier]
            loose[key] = backup
            loose.move_to_end(key, last=False)
