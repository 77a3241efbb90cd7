"""Which members a changed lease concerns immediately: one must free bytes, or one waits to see bytes free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from floodplain.leases.states import Lease, LeaseState


class _End(Enum):
    PRODUCER = "producer"
    CONSUMER = "consumer"


_HAS_NEWS: Mapping[LeaseState, tuple[_End, ...]] = {
    LeaseState.GRANTED: (),  # the answer to its request tells the consumer
    LeaseState.HELD: (),
    LeaseState.RECALLED: (_End.CONSUMER,),
    LeaseState.REFUSED: (_End.PRODUCER,),
    LeaseState.RELEASED: (_End.PRODUCER,),
    LeaseState.EXPIRED: (_End.PRODUCER, _End.CONSUMER),
    LeaseState.SETTLED: (),  # the producer has reported this itself
    LeaseState.LOST: (_End.CONSUMER,),
}


def concerned(leases: Iterable[Lease]) -> set[str]:
    """Return names of the members that should ask for their leases now, not at the next heartbeat.

    Args:
        leases: Rows after their changes.
    """
    return {
        lease.producer if end is _End.PRODUCER else lease.consumer for lease in leases for end in _HAS_NEWS[lease.state]
    }
