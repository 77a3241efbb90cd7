"""Limits of a lease book: the least lease, what a consumer may have, how many members are kept and for how long."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_LEASE_BYTES = 64 * 1024
"""One page of a host device. A lease of one byte costs the coordinator as much as one of a gigabyte."""
MAX_LEASES = 1024
MAX_BORROWED_BYTES = 2**40
MAX_LEASES_ON_DEVICE = 4096
MAX_MEMBERS = 4096
FORGET_AFTER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """Limits of one lease book. Owed leases count.

    Attributes:
        least_lease_bytes: A smaller shard is refused.
        max_leases: Of one consumer.
        max_borrowed_bytes: Of one consumer.
        max_leases_on_device: A producer that has so many grants no more.
        max_members: Living and ended. If it is reached, a new member replaces the one that ended first.
        forget_after_s: A member that ended so long ago, and that has no lease, is forgotten.
    """

    least_lease_bytes: int = 1
    max_leases: int = MAX_LEASES
    max_borrowed_bytes: int = MAX_BORROWED_BYTES
    max_leases_on_device: int = MAX_LEASES_ON_DEVICE
    max_members: int = MAX_MEMBERS
    forget_after_s: float = FORGET_AFTER_S

    @property
    def max_consumers(self) -> int:
        """Return the most members with which one may join without a producer's token; the rest is room for lenders."""
        return self.max_members - self.max_members // 4


DEFAULT_LIMITS = LeaseLimits()
"""Leases of any size; the rest as named above."""
