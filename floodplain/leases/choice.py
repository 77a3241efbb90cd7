"""Chooses a request's devices, the leases that a recall takes back, and those that a placement disallows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseState


def choose_producers(shards: Sequence[Shard], free_bytes: Mapping[str, int]) -> list[str] | None:
    """Return a device for every shard, or None if not all of them fit. A shard that names its device fits only there.

    ``free_bytes``: unleased bytes of producers that the consumer may borrow from; among equals, the first is preferred.
    """
    left = dict(free_bytes)
    chosen: dict[int, str] = {}
    for index, shard in enumerate(shards):
        if shard.producer is not None:
            if left.get(shard.producer, 0) < shard.num_bytes:
                return None
            left[shard.producer] -= shard.num_bytes
            chosen[index] = shard.producer
    freest = [(-num_bytes, place, name) for place, (name, num_bytes) in enumerate(left.items())]
    heapify(freest)
    anywhere = (index for index, shard in enumerate(shards) if shard.producer is None)
    for index in sorted(anywhere, key=lambda index: -shards[index].num_bytes):
        free, place, name = freest[0] if freest else (0, 0, "")
        if -free < shards[index].num_bytes:
            return None
        heapreplace(freest, (free + shards[index].num_bytes, place, name))
        chosen[index] = name
    return [chosen[index] for index in range(len(shards))]


def choose_recalls(leases: Iterable[Lease], num_bytes: int) -> list[Lease]:
    """Return granted or held leases that add up to ``num_bytes``; all of them if they are too few.

    Unallocated leases go first, because they cost nothing; then the smallest one that is enough, or else the largest.
    """
    left = [lease for lease in leases if lease.state in (LeaseState.GRANTED, LeaseState.HELD)]
    chosen: list[Lease] = []
    missing = num_bytes
    while missing > 0 and left:
        lease = min(left, key=lambda lease: _cost(lease, missing))
        left.remove(lease)
        chosen.append(lease)
        missing -= lease.num_bytes
    return chosen


def choose_settled(owed: Iterable[Lease], num_bytes: int) -> list[Lease]:
    """Return the owed leases that ``num_bytes`` free bytes cover: in their order, each one that still fits."""
    chosen: list[Lease] = []
    for lease in owed:
        if lease.num_bytes <= num_bytes:
            num_bytes -= lease.num_bytes
            chosen.append(lease)
    return chosen


def _cost(lease: Lease, missing: int) -> tuple[bool, bool, int, str]:
    is_enough = lease.num_bytes >= missing
    return lease.held_bytes > 0, not is_enough, lease.num_bytes if is_enough else -lease.num_bytes, lease.lease_id


AllowedPairs = Mapping[str, Sequence[str]]
"""For each consumer the producers that it may borrow from, best first. A consumer without an entry borrows nothing."""


def choose_disallowed(leases: Iterable[Lease], pairs: AllowedPairs | None) -> list[Lease]:
    """Return granted or held leases that the pairs do not allow; None allows all."""
    if pairs is None:
        return []
    counted_on = (lease for lease in leases if lease.state in (LeaseState.GRANTED, LeaseState.HELD))
    return [lease for lease in counted_on if lease.producer not in pairs.get(lease.consumer, ())]
