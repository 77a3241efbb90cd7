"""Messages of members to the coordinator. Values; each may arrive late, twice, or never."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseEvent, LeaseId, Stamp


@dataclass(frozen=True, slots=True)
class Join:
    """A process starts, or joins anew after it was considered dead."""

    name: str
    instance: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A process ends in an orderly way: it no longer counts on its leases, and a successor may join at once.

    Attributes:
        name: Its name.
        generation: Its incarnation.
        is_last: The name is never used again: the device is gone, too.
    """

    name: str
    generation: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member is alive. Renews everything that it lends and borrows; the reply lists all of that."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Set the bytes that a producer offers, leased ones included; fewer than before withdraws some."""

    name: str
    stamp: Stamp
    offered_bytes: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A producer recalls ``num_bytes``: unleased ones immediately, the rest from consumers within ``deadline_s``."""

    name: str
    stamp: Stamp
    num_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Observe:
    """A producer has measured its device: others hold ``foreign_bytes``."""

    name: str
    stamp: Stamp
    foreign_bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """A consumer requests all of these shards, or none.

    Requests are numbered upwards; the same number twice is the same request.
    """

    name: str
    generation: int
    number: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A consumer reports on a lease: ``event`` is HOLD, REFUSE (with a reason) or RELEASE."""

    name: str
    lease_id: LeaseId
    stamp: Stamp
    event: LeaseEvent
    reason: str = ""


Message = Join | Leave | Heartbeat | Offer | Recall | Observe | Request | Report
