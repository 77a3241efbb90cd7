"""Measures the durations of recalls, as a member sees them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from floodplain.leases.states import Lease, LeaseId, LeaseState


@dataclass(slots=True)
class RecallTimes:
    """Durations of recalls: from learning of one until the bytes were free (consumer), or seen free (producer)."""

    began_s: dict[LeaseId, float] = field(default_factory=dict)
    ended: list[float] = field(default_factory=list)

    def update(self, leases: Collection[Lease], now: float) -> None:
        """Start timing newly recalled leases, and end the recalls of leases that are gone from ``leases``."""
        there = {lease.lease_id for lease in leases}
        for lease in leases:
            if lease.state is LeaseState.RECALLED:
                self.began_s.setdefault(lease.lease_id, now)
        for lease_id in self.began_s.keys() - there:
            self.ended.append(now - self.began_s.pop(lease_id))
