"""Models that document the coordinator's answers. ``wire.py`` encodes the rows themselves."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from floodplain.leases.states import LeaseState, Outcome


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemberRow(_Answer):
    """A member, with the fields of ``leases.rows.Member``."""

    name: str
    instance: str
    generation: int
    revision: int
    offered_bytes: int
    last_request: int
    is_gone: bool
    is_lender: bool
    hidden_bytes: int


class LeaseRow(_Answer):
    """A lease, with the fields of ``leases.states.Lease``."""

    lease_id: str
    request: int
    producer: str
    consumer: str
    num_bytes: int
    generation: int
    state: LeaseState
    revision: int
    held_bytes: int
    deadline_s: float | None
    reason: str


class ReplyBody(_Answer):
    """The outcome of a message, and the rows that it was about."""

    outcome: Outcome
    member: MemberRow | None
    leases: list[LeaseRow]
    due_in_s: dict[str, float]
    detail: str
    leases_of: int | None = Field(
        None, description="The leases are those of this earlier reply to the batch; absent if they are here."
    )


class ReplyBatch(_Answer):
    """The replies in the order of the messages; and the seconds of silence after which a member is considered dead."""

    ttl_s: float
    replies: list[ReplyBody]


class ListedLease(LeaseRow):
    """A lease, when it was granted (Unix time), and how long its consumer has left if it is recalled."""

    granted_unix_s: float
    due_in_s: float | None


class ListedMember(MemberRow):
    """A member, whether it is considered alive, and how much of its device is leased or owed."""

    is_living: bool
    leased_bytes: int


class Listing(_Answer):
    """All members, and all leases that have not ended."""

    ttl_s: float
    members: list[ListedMember]
    leases: list[ListedLease]


class NewsBody(_Answer):
    """Whether the member should ask for its leases now, and the mark to send with the next request for news."""

    mark: str
    has_news: bool


class ServiceHealth(_Answer):
    """Whether this coordinator leads; one that stands by takes over when the leader ends."""

    status: Literal["ok"] = "ok"
    role: Literal["leading", "standing by"]
    leader_url: str
