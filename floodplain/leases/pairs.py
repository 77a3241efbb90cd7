"""Which consumer may borrow from which producer under a placement, and the disallowed leases. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from floodplain.leases.states import Lease, LeaseState

AllowedPairs = Mapping[str, Sequence[str]]
"""For each consumer the producers that it may borrow from, best first. A consumer without an entry borrows nothing."""


def allows(pairs: AllowedPairs | None, consumer: str, producer: str) -> bool:
    """Whether a consumer may borrow from a producer; if ``pairs`` is None, always."""
    return pairs is None or producer in pairs.get(consumer, ())


def choose_disallowed(leases: Iterable[Lease], pairs: AllowedPairs | None) -> list[Lease]:
    """Return granted or held leases that the pairs do not allow."""
    counted_on = (lease for lease in leases if lease.state in (LeaseState.GRANTED, LeaseState.HELD))
    return [lease for lease in counted_on if not allows(pairs, lease.consumer, lease.producer)]
