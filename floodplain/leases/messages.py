"""Messages of members to the coordinator. Values; each may arrive late, twice, or never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from floodplain.core.ranges import Length, OneOf
from floodplain.leases.rows import Shard
from floodplain.leases.states import (
    IDENTITY,
    REASON,
    Deadline,
    LeaseEvent,
    LeaseId,
    Name,
    SentCount,
    SentNumber,
    Stamp,
)

MAX_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Join:
    """A process starts, or joins anew after it was considered dead."""

    name: Name
    instance: Annotated[str, IDENTITY]


@dataclass(frozen=True, slots=True)
class Leave:
    """A process ends in an orderly way.

    It no longer counts on its leases, and a successor may join at once. If ``is_last``, the device is gone, too.
    """

    name: Name
    generation: SentCount
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member is alive; the answer lists all that it lends and borrows.

    Renews all of that.
    """

    name: Name
    generation: SentCount


@dataclass(frozen=True, slots=True)
class Offer:
    """A producer sets the bytes that it offers, leased ones included.

    Fewer than before withdraws some.
    """

    name: Name
    stamp: Stamp
    offered_bytes: SentCount


@dataclass(frozen=True, slots=True)
class Recall:
    """A producer recalls bytes: unleased ones immediately, the rest from consumers within the deadline."""

    name: Name
    stamp: Stamp
    num_bytes: SentNumber
    deadline_s: Deadline


@dataclass(frozen=True, slots=True)
class Observe:
    """A producer has measured how many bytes of its device others hold."""

    name: Name
    stamp: Stamp
    foreign_bytes: SentCount


@dataclass(frozen=True, slots=True)
class Request:
    """A consumer requests all of these shards, or none.

    Requests are numbered upwards; the same number twice is the same request.
    """

    name: Name
    generation: SentCount
    number: SentNumber
    shards: Annotated[tuple[Shard, ...], Length(MAX_SHARDS, 1)]


@dataclass(frozen=True, slots=True)
class Report:
    """A consumer reports that it allocated, refused, or freed a lease.

    ``reason`` says why it refused.
    """

    name: Name
    lease_id: Annotated[LeaseId, IDENTITY]
    stamp: Stamp
    event: Annotated[LeaseEvent, OneOf(("hold", "refuse", "release"))]
    reason: Annotated[str, REASON] = ""


Message = Join | Leave | Heartbeat | Offer | Recall | Observe | Request | Report
