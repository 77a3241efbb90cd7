"""Models that validate and document what the coordinator's API takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from floodplain.leases import messages as core
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseEvent, LeaseId, Stamp
from floodplain.web.bodies import BoundedModel

MAX_MESSAGES = 1024
MAX_SHARDS = 64
MAX_DEADLINE_S = 86400.0
MAX_WAIT_S = 60.0
"""For news; proxies and firewalls cut longer silences."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Of a member: of its device.")]
Identity = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Number = Annotated[int, Field(ge=1, lt=2**62)]


class _Part(BoundedModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StampPart(_Part):
    """The sender's generation, and the revision of the row that it has seen."""

    generation: Count
    revision: Count

    def to_core(self) -> Stamp:
        """Return the core value."""
        return Stamp(self.generation, self.revision)


class ShardPart(_Part):
    """Bytes that must be on one device: the named one, or any."""

    num_bytes: Number
    producer: Name | None = None


class JoinMessage(_Part):
    """A process starts, or joins anew after it was considered dead."""

    kind: Literal["join"]
    name: Name
    instance: Identity

    def to_core(self) -> core.Join:
        """Return the core value."""
        return core.Join(self.name, self.instance)


class LeaveMessage(_Part):
    """A process ends in an orderly way."""

    kind: Literal["leave"]
    name: Name
    generation: Count
    is_last: bool = False

    def to_core(self) -> core.Leave:
        """Return the core value."""
        return core.Leave(self.name, self.generation, self.is_last)


class HeartbeatMessage(_Part):
    """A member is alive; the answer lists all that it lends and borrows."""

    kind: Literal["heartbeat"]
    name: Name
    generation: Count

    def to_core(self) -> core.Heartbeat:
        """Return the core value."""
        return core.Heartbeat(self.name, self.generation)


class OfferMessage(_Part):
    """A producer sets the bytes that it offers, leased ones included."""

    kind: Literal["offer"]
    name: Name
    stamp: StampPart
    offered_bytes: Count

    def to_core(self) -> core.Offer:
        """Return the core value."""
        return core.Offer(self.name, self.stamp.to_core(), self.offered_bytes)


class RecallMessage(_Part):
    """A producer recalls bytes: unleased ones immediately, the rest from consumers within the deadline."""

    kind: Literal["recall"]
    name: Name
    stamp: StampPart
    num_bytes: Number
    deadline_s: Annotated[float, Field(ge=0, le=MAX_DEADLINE_S)]

    def to_core(self) -> core.Recall:
        """Return the core value."""
        return core.Recall(self.name, self.stamp.to_core(), self.num_bytes, self.deadline_s)


class ObserveMessage(_Part):
    """A producer has measured how many bytes of its device others hold."""

    kind: Literal["observe"]
    name: Name
    stamp: StampPart
    foreign_bytes: Count

    def to_core(self) -> core.Observe:
        """Return the core value."""
        return core.Observe(self.name, self.stamp.to_core(), self.foreign_bytes)


class RequestMessage(_Part):
    """A consumer requests all of these shards, or none."""

    kind: Literal["request"]
    name: Name
    generation: Count
    number: Number
    shards: Annotated[list[ShardPart], Field(min_length=1, max_length=MAX_SHARDS)]

    def to_core(self) -> core.Request:
        """Return the core value."""
        shards = tuple(Shard(shard.num_bytes, shard.producer) for shard in self.shards)
        return core.Request(self.name, self.generation, self.number, shards)


class ReportMessage(_Part):
    """A consumer reports that it allocated, refused, or freed a lease."""

    kind: Literal["report"]
    name: Name
    lease_id: Identity
    stamp: StampPart
    event: Literal["hold", "refuse", "release"]
    reason: Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")] = ""

    def to_core(self) -> core.Report:
        """Return the core value."""
        stamp, event = self.stamp.to_core(), LeaseEvent(self.event)
        return core.Report(self.name, LeaseId(self.lease_id), stamp, event, self.reason)


AnyMessage = Annotated[
    JoinMessage
    | LeaveMessage
    | HeartbeatMessage
    | OfferMessage
    | RecallMessage
    | ObserveMessage
    | RequestMessage
    | ReportMessage,
    Field(discriminator="kind"),
]


class MessageBatch(_Part):
    """Messages, handled in their order and committed together."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class NewsQuery(BaseModel):
    """The member whose news to wait for, and for how long."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    member: Name
    mark: Annotated[str, Field(max_length=64, description="Of the last answer; empty the first time.")] = ""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="Seconds, at most.")] = 20.0
