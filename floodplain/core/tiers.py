"""Tiers of memory for KV, links to them, and the ledger of each tier's slots."""

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

    __hash__ = object.__hash__  # by identity, which is faster: the loop looks tiers up for every block that moves


class Direction(Enum):
    """Direction of a copy, seen from the device that computes."""

    OUTBOUND = "outbound"
    INBOUND = "inbound"

    __hash__ = object.__hash__

    @property
    def opposite(self) -> Direction:
        """The other direction."""
        return Direction.INBOUND if self is Direction.OUTBOUND else Direction.OUTBOUND


@dataclass(frozen=True, slots=True)
class Location:
    """One block-sized slot of a tier."""

    tier: Tier
    slot: int


@dataclass(frozen=True, slots=True)
class Link:
    """The path from LOCAL to a tier: bytes per second of one large copy, and seconds before its first byte."""

    tier: Tier
    bandwidth: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Time for which a link was busy with copies in one direction.

    ``num_blocks`` counts KV blocks; a copy of some layers counts that part of its blocks. ``duration_s`` lasts from the
    beginning of the first copy to the end of the last, gathering and digests included, without the wait before.
    """

    tier: Tier
    direction: Direction
    num_copies: int
    num_blocks: float
    duration_s: float


class SlotLedger:
    """Which slots of one tier are taken, at first of ``num_slots`` from 0 on. Scarcity is None, never an exception."""

    def __init__(self, tier: Tier, num_slots: int) -> None:
        self.tier = tier
        self._fresh = range(num_slots)  # never taken: allocated when _free is empty; of _free, the last goes first
        self._free: list[int] = []
        self._there: range | set[int] = self._fresh
        self.settled: set[int] = set()
        """Slots that were freed, or whose content became merely retained, until a reader clears it."""
        self._taken: set[int] = set()
        self._leaving: set[int] = set()  # taken, and removed when they are freed

    @property
    def num_slots(self) -> int:
        """Slots of the tier, without retired ones."""
        return len(self._there)

    @property
    def num_free(self) -> int:
        """Slots that can still be allocated."""
        return len(self._free) + len(self._fresh)

    @property
    def num_taken(self) -> int:
        """Number of allocated slots."""
        return len(self._taken)

    @property
    def taken(self) -> Set[int]:
        """The allocated slots; a live view, not a copy."""
        return self._taken

    def add(self, slots: Iterable[int]) -> None:
        """Add slots; InvariantError if the tier has one of them already."""
        new = sorted(slots, reverse=True)
        there = self._list_slots()
        if not (there | self._taken).isdisjoint(new):
            raise InvariantError(f"{self.tier} has some of the slots {new[-1]} to {new[0]} already")
        self._free += new
        there.update(new)

    def retire(self, slots: Iterable[int]) -> None:
        """Remove slots: free ones at once, taken ones when they are freed; none is allocated again."""
        gone, there = set(slots), self._list_slots()
        self._free = [slot for slot in self._free if slot not in gone]
        self._leaving |= self._taken & gone
        there -= gone

    def count_taken(self, slots: Collection[int]) -> int:
        """How many of these slots are allocated."""
        return sum(slot in slots for slot in self._taken)

    def is_leaving(self, location: Location) -> bool:
        """Whether a slot is taken and retired, so that it is removed when it is freed."""
        return location.slot in self._leaving

    def allocate(self, num_slots: int) -> list[Location] | None:
        """Allocate ``num_slots`` slots; None if there are too few."""
        if num_slots > self.num_free:
            return None
        slots = [self._free.pop() for _ in range(min(num_slots, len(self._free)))]
        num_fresh = num_slots - len(slots)
        slots += self._fresh[:num_fresh]
        self._fresh = self._fresh[num_fresh:]
        self._taken.update(slots)
        return [Location(self.tier, slot) for slot in slots]

    def free(self, location: Location) -> None:
        """Free one slot; InvariantError if it is not taken."""
        if location.tier is not self.tier or location.slot not in self._taken:
            raise InvariantError(f"{location} is freed but not taken")
        self._taken.remove(location.slot)
        self.settled.add(location.slot)
        if location.slot in self._leaving:
            self._leaving.remove(location.slot)
        else:
            self._free.append(location.slot)

    def check_integrity(self) -> None:
        """Raise InvariantError unless every slot is either free or taken."""
        if sorted([*self._free, *self._fresh, *(self._taken - self._leaving)]) != sorted(self._there):
            raise InvariantError(f"{self.tier} lost or doubled a slot")

    def _list_slots(self) -> set[int]:
        """Turn ranges into sets and lists, before the first slots are added or removed; return all slots."""
        if isinstance(self._there, range):
            self._there = set(self._there)
            self._free = [*reversed(self._fresh), *self._free]
            self._fresh = range(0)
        return self._there


def source_of_slot(slot: int) -> int:
    """Encode a slot of the host tier as a *source*: an integer of 32 bits, below 0; a device block is 0 or above."""
    return -1 - slot


def find_slot(source: int) -> int | None:
    """The slot of the host tier that a source names; None if it names a block of the device's pool."""
    return -1 - source if source < 0 else None
