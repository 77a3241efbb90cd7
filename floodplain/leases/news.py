"""Whom the change of a lease concerns at once: who must free bytes, and who waits to see bytes free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from floodplain.leases.states import Lease, LeaseState


class _End(Enum):
    PRODUCER = "producer"
    CONSUMER = "consumer"


_HAS_NEWS: Mapping[LeaseState, tuple[_End, ...]] = {
    LeaseState.GRANTED: (),  # the consumer is told by the answer to its request
    LeaseState.HELD: (),
    LeaseState.RECALLED: (_End.CONSUMER,),
    LeaseState.REFUSED: (_End.PRODUCER,),
    LeaseState.RELEASED: (_End.PRODUCER,),
    LeaseState.EXPIRED: (_End.PRODUCER, _End.CONSUMER),
    LeaseState.SETTLED: (),  # the producer has said so itself
    LeaseState.LOST: (_End.CONSUMER,),
}


def concerned(leases: Iterable[Lease]) -> set[str]:
    """Names of the members that should ask for their leases now, and not with the next beat.

    Args:
        leases: Rows as they are after their changes.
    """
    return {
        lease.producer if end is _End.PRODUCER else lease.consumer for lease in leases for end in _HAS_NEWS[lease.state]
    }
