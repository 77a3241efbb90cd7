"""How long recalls take, as a member sees them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from floodplain.leases.states import Lease, LeaseId, LeaseState


@dataclass(slots=True)
class RecallTimes:
    """How long recalls took: from hearing of one until the bytes were free (a consumer), or seen free (a producer)."""

    began_s: dict[LeaseId, float] = field(default_factory=dict)
    ended: list[float] = field(default_factory=list)

    def update(self, leases: Collection[Lease], now: float) -> None:
        """Take note of leases that are recalled, and of those that were and are no longer there."""
        there = {lease.lease_id for lease in leases}
        for lease in leases:
            if lease.state is LeaseState.RECALLED:
                self.began_s.setdefault(lease.lease_id, now)
        for lease_id in self.began_s.keys() - there:
            self.ended.append(now - self.began_s.pop(lease_id))
