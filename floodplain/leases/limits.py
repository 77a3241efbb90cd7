"""How much a book takes on: the least lease, what one consumer may have, how many members it remembers and for long."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_LEASE_BYTES = 64 * 1024
"""One page of a host device. A lease costs the coordinator as much whether it is of a byte or of a gigabyte."""
MAX_LEASES = 1024
MAX_BORROWED_BYTES = 2**40
MAX_LEASES_ON_DEVICE = 4096
MAX_MEMBERS = 4096
FORGET_AFTER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """See the module.

    Attributes:
        least_lease_bytes: A smaller shard is refused.
        max_leases: Of one consumer, owed ones included.
        max_borrowed_bytes: Of one consumer, owed ones included.
        max_leases_on_device: Of one producer, owed ones included: a producer that has so many lends no more.
        max_members: Living and ended ones. If there are so many, the one that ended first is forgotten for a new one.
        forget_after_s: A member that ended so long ago, and that neither owes nor is owed a lease, is forgotten.
    """

    least_lease_bytes: int = 1
    max_leases: int = MAX_LEASES
    max_borrowed_bytes: int = MAX_BORROWED_BYTES
    max_leases_on_device: int = MAX_LEASES_ON_DEVICE
    max_members: int = MAX_MEMBERS
    forget_after_s: float = FORGET_AFTER_S

    @property
    def max_consumers(self) -> int:
        """With so many members no other begins without a producer's token: there is always room for lenders."""
        return self.max_members - self.max_members // 4


DEFAULT_LIMITS = LeaseLimits()
"""Leases of any size; the rest as named above."""
