"""What members say to the coordinator. Values; every one may arrive late, twice, or never."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseEvent, LeaseId, Stamp


@dataclass(frozen=True, slots=True)
class Join:
    """A process begins, or begins anew because it was taken for dead."""

    name: str
    instance: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A process ends as it should: it counts on nothing any more, and can be followed at once.

    Attributes:
        name: Its name.
        generation: Its incarnation.
        is_last: Nobody will have that name again: its device goes with it.
    """

    name: str
    generation: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member is alive. This renews everything that it lends and borrows; the reply tells it of all that."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Offer:
    """From now on ``offered_bytes`` are put up, leased bytes included; fewer than before withdraws some."""

    name: str
    stamp: Stamp
    offered_bytes: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A producer wants ``num_bytes`` back: what is unleased at once, the rest from consumers within ``deadline_s``."""

    name: str
    stamp: Stamp
    num_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Observe:
    """A producer has looked: others hold ``foreign_bytes`` of its device."""

    name: str
    stamp: Stamp
    foreign_bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """A consumer wants all of these shards, or none.

    It numbers its requests upwards; asking twice with one number is asking once.
    """

    name: str
    generation: int
    number: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A consumer says what became of a lease: ``event`` is HOLD, REFUSE (and why) or RELEASE."""

    name: str
    lease_id: LeaseId
    stamp: Stamp
    event: LeaseEvent
    reason: str = ""


Message = Join | Leave | Heartbeat | Offer | Recall | Observe | Request | Report
