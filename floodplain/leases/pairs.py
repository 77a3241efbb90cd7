"""Who may borrow from whom, where a placement says so, and which leases it no longer allows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from floodplain.leases.states import Lease, LeaseState

AllowedPairs = Mapping[str, Sequence[str]]
"""For each consumer the producers that it may borrow from, best first. Consumers that are not there borrow nothing."""


def allows(pairs: AllowedPairs | None, consumer: str, producer: str) -> bool:
    """Whether a consumer may borrow from a producer; without any pairs all may borrow from all."""
    return pairs is None or producer in pairs.get(consumer, ())


def choose_disallowed(leases: Iterable[Lease], pairs: AllowedPairs | None) -> list[Lease]:
    """Leases whose consumers count on them, and that the pairs do not allow."""
    counted_on = (lease for lease in leases if lease.state in (LeaseState.GRANTED, LeaseState.HELD))
    return [lease for lease in counted_on if not allows(pairs, lease.consumer, lease.producer)]
