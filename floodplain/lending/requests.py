"""Requests of one borrower for leases of one size, and the memory of what it is granted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from floodplain.core.errors import UserError
from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease
from floodplain.lending.membership import Membership
from floodplain.memory.peer.memory import Extent, PeerMemory

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""The default interval of a borrower's polls of its leases: each poll may begin two relocations."""
MOST_PENDING = 4
"""The most leases that a borrower requests at a time."""


@dataclass(slots=True)
class PeerTotals:
    """Counts of leases since the start: made slots, not allocated, returned empty, and freed before they were empty."""

    num_granted: int = 0
    num_refused: int = 0
    num_returned: int = 0
    num_forced: int = 0

    def by_outcome(self) -> dict[str, int]:
        """Return the counts by the names that metrics use: ``granted``, and so on."""
        return {name.removeprefix("num_"): number for name, number in asdict(self).items()}


class LeaseRequests:
    """The open requests of one borrower for leases of at least ``num_bytes``, in whole pages. One thread at a time.

    ``siblings`` has those of all borrowers that share the client; the new one is appended. None if it is the only one.
    """

    def __init__(
        self,
        client: Membership,
        memory: PeerMemory,
        num_bytes: int,
        siblings: list[LeaseRequests] | None = None,
    ) -> None:
        self._siblings = [] if siblings is None else siblings
        self._siblings.append(self)
        self._client, self._memory, self._num_bytes, self.totals = client, memory, num_bytes, PeerTotals()
        self._pending: set[int] = set()

    def follow(self, num_missing: int) -> None:
        """Request or cancel leases until as many are requested as are missing, at most ``MOST_PENDING`` at a time."""
        self._pending &= set(self._client.pending())
        num_missing -= len(self._pending)
        for _ in range(min(-num_missing, len(self._pending))):
            self._client.cancel(self._pending.pop())
        page_bytes = self._memory.page_bytes
        shard = Shard(-(-self._num_bytes // page_bytes) * page_bytes)
        for _ in range(min(num_missing, MOST_PENDING - len(self._pending))):
            self._pending.add(self._client.ask([shard]))

    def take_grants(self) -> Iterator[Lease]:
        """Yield leases granted to these requests: allocate or refuse each. Those of no borrower here are refused."""
        others = (sibling._pending for sibling in self._siblings if sibling is not self)
        for lease in self._client.to_allocate(set().union(*others)):
            if lease.request in self._pending:
                self._pending.remove(lease.request)
                yield lease
            else:
                self._client.refused(lease.lease_id, "this engine has not asked for it")

    def allocate(self, lease: Lease, *, has_place: bool = True) -> Extent | None:
        """Allocate a granted lease; None if that fails or the borrower has no place. Reports which."""
        extent, reason = allocate_lease(self._client, self._memory, lease, has_place=has_place)
        if extent is None:
            self.totals.num_refused += 1
            logger.warning("lease %s is of no use: %s", lease.lease_id, reason)
        return extent

    def cancel(self) -> None:
        """Cancel all requests. Safe to call twice."""
        for number in self._pending:
            self._client.cancel(number)
        self._pending.clear()


def allocate_lease(
    client: Membership, memory: PeerMemory, lease: Lease, *, has_place: bool = True
) -> tuple[Extent | None, str]:
    """Allocate a granted lease, and report whether it is of use: (its memory, "") or (None, why there is none)."""
    extent, reason = None, f"{lease.producer} has no room for {lease.num_bytes} bytes"
    try:
        extent = memory.allocate(lease.producer, lease.num_bytes) if has_place else None
    except UserError as error:
        reason = str(error)
    if extent is None:
        client.refused(lease.lease_id, reason)
        return None, reason
    client.allocated(lease.lease_id)
    return extent, ""
