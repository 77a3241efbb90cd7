"""Where KV bytes can live, and who holds which slot there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from enum import Enum

from floodplain.core.errors import InvariantError


class Tier(Enum):
    """A kind of memory, seen from the device that computes."""

    LOCAL = "local"
    PEER = "peer"
    HOST = "host"

    __hash__ = object.__hash__  # of the one object that each is: the loop looks tiers up for every block that moves


class Direction(Enum):
    """Which way a copy goes, seen from the device that computes."""

    OUTBOUND = "outbound"
    INBOUND = "inbound"

    __hash__ = object.__hash__

    @property
    def opposite(self) -> Direction:
        """The other one."""
        return Direction.INBOUND if self is Direction.OUTBOUND else Direction.OUTBOUND


@dataclass(frozen=True, slots=True)
class Location:
    """One block-sized slot of a tier."""

    tier: Tier
    slot: int


@dataclass(frozen=True, slots=True)
class Link:
    """The path from LOCAL to a tier.

    Attributes:
        tier: The far end.
        bandwidth: Bytes per second of one large copy.
        latency_s: Seconds before its first byte.
    """

    tier: Tier
    bandwidth: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyTime:
    """How long a link was busy with copies of one direction that went over it one after another.

    Attributes:
        tier: The far end.
        direction: Of all copies.
        num_copies: How many.
        num_blocks: KV blocks of all copies; of a copy of some layers, that part of them.
        duration_s: Seconds from the beginning of the first copy to the end of the last, gathering and digests included,
            without the wait before.
    """

    tier: Tier
    direction: Direction
    num_copies: int
    num_blocks: float
    duration_s: float


class SlotLedger:
    """Which slots of one tier are taken. Scarcity is None, never an exception.

    Args:
        tier: Which one.
        num_slots: Slots that are there from the start, numbered from 0.
    """

    def __init__(self, tier: Tier, num_slots: int) -> None:
        self.tier = tier
        self._fresh = range(num_slots)  # never taken: given when none is in _free, whose last one goes first
        self._free: list[int] = []
        self._there: range | set[int] = self._fresh
        self.settled: set[int] = set()
        """Slots that were freed, or whose content became merely retained, until a reader clears it."""
        self._taken: set[int] = set()
        self._leaving: set[int] = set()  # taken, and gone when they are freed

    @property
    def num_slots(self) -> int:
        """Slots that are there to stay."""
        return len(self._there)

    @property
    def num_free(self) -> int:
        """Slots that ``allocate`` can still give."""
        return len(self._free) + len(self._fresh)

    @property
    def num_taken(self) -> int:
        """Slots that were given and not freed."""
        return len(self._taken)

    @property
    def taken(self) -> Set[int]:
        """Slots that were given and not freed, as they are at any time."""
        return self._taken

    def add(self, slots: Iterable[int]) -> None:
        """There are more slots.

        Raises:
            InvariantError: One of them is there already.
        """
        new = sorted(slots, reverse=True)
        there = self._list_slots()
        if not (there | self._taken).isdisjoint(new):
            raise InvariantError(f"{self.tier} has some of the slots {new[-1]} to {new[0]} already")
        self._free += new
        there.update(new)

    def retire(self, slots: Iterable[int]) -> None:
        """These slots go: the free ones at once, the taken ones when they are freed; none is given any more."""
        gone, there = set(slots), self._list_slots()
        self._free = [slot for slot in self._free if slot not in gone]
        self._leaving |= self._taken & gone
        there -= gone

    def count_taken(self, slots: Collection[int]) -> int:
        """How many of these slots were given and not freed."""
        return sum(slot in slots for slot in self._taken)

    def is_leaving(self, location: Location) -> bool:
        """Whether a slot is taken, and gone when it is freed."""
        return location.slot in self._leaving

    def allocate(self, num_slots: int) -> list[Location] | None:
        """Take ``num_slots`` slots, or none at all (None) if there are too few."""
        if num_slots > self.num_free:
            return None
        slots = [self._free.pop() for _ in range(min(num_slots, len(self._free)))]
        num_fresh = num_slots - len(slots)
        slots += self._fresh[:num_fresh]
        self._fresh = self._fresh[num_fresh:]
        self._taken.update(slots)
        return [Location(self.tier, slot) for slot in slots]

    def free(self, location: Location) -> None:
        """Give one slot back.

        Raises:
            InvariantError: The slot is not taken.
        """
        if location.tier is not self.tier or location.slot not in self._taken:
            raise InvariantError(f"{location} is freed but not taken")
        self._taken.remove(location.slot)
        self.settled.add(location.slot)
        if location.slot in self._leaving:
            self._leaving.remove(location.slot)
        else:
            self._free.append(location.slot)

    def check_integrity(self) -> None:
        """Every slot is exactly one of free and taken.

        Raises:
            InvariantError: It is not.
        """
        if sorted([*self._free, *self._fresh, *(self._taken - self._leaving)]) != sorted(self._there):
            raise InvariantError(f"{self.tier} lost or doubled a slot")

    def _list_slots(self) -> set[int]:
        """All that are there to stay, and those that were never taken in ``_free``: some come or go."""
        if isinstance(self._there, range):
            self._there = set(self._there)
            self._free = [*reversed(self._fresh), *self._free]
            self._fresh = range(0)
        return self._there
