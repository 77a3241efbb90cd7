"""Messages to the coordinator and its answers as JSON. Standard library only: agents use it on bare GPU images.

A message is an object of its fields and its ``kind``. Answers are open objects (``core.codec``): the coordinator may be
of another version. ``decode_...`` returns values whose types and ranges are checked, or raises ``WireError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from floodplain.core.codec import WireError, from_json, to_json
from floodplain.core.ranges import ADDED, Pattern, Range
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import MAX_SECONDS, Lease

TTL = Range(1e-3, 3600.0)
"""The TTLs that a coordinator may have, in seconds."""
MAX_UNIX_S = 1e11
"""The year 5138."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to a batch: its TTL in seconds, and a reply to each message in order."""

    ttl_s: float
    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True)
class EncodedReply(Reply):
    """The outcome of a message, and the rows that it was about."""

    leases_of: Annotated[int | None, ADDED] = field(
        default=None,
        metadata={
            "description": "The leases are those of this earlier reply to the batch; absent if they are here.",
        },
    )


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """The replies in the order of the messages; and the seconds of silence after which a member is considered dead."""

    ttl_s: Annotated[float, TTL]
    replies: tuple[EncodedReply, ...]


@dataclass(frozen=True, slots=True)
class News:
    """Whether the member should ask for its leases now, and the mark to send with the next request for news."""

    mark: Annotated[str, Pattern(r"[0-9a-f]{1,32}\.[0-9]{1,19}")]
    has_news: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMember(Member):
    """A member, whether it is considered alive, and how much of its device is leased or owed."""

    is_living: bool
    leased_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLease(Lease):
    """A lease, when it was granted (Unix time), and how long its consumer has left if it is recalled."""

    granted_unix_s: Annotated[float, Range(0.0, MAX_UNIX_S)]
    due_in_s: Annotated[float, Range(-MAX_UNIX_S, MAX_SECONDS)] | None


@dataclass(frozen=True, slots=True)
class Listing:
    """All members, and all leases that have not ended."""

    ttl_s: Annotated[float, TTL]
    members: tuple[ListedMember, ...]
    leases: tuple[ListedLease, ...]


def encode_message(message: Message) -> dict[str, Any]:
    """Return a message as an object that ``json.dumps`` takes."""
    return {"kind": type(message).__name__.lower(), **to_json(message)}


def encode_replies(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Return the replies to a batch. Leases that several share (``LeaseBook.handle_all``) are only in the first.

    The others have ``leases_of``, the place of that first one.
    """
    first: dict[int, int] = {}
    encoded = []
    for place, reply in enumerate(replies):
        shared = first.setdefault(id(reply.leases), place)
        if not reply.leases or shared == place:
            encoded.append(to_json(reply))
        else:
            encoded.append({**to_json(replace(reply, leases=(), due_in_s={})), "leases_of": shared})
    return encoded


def decode_answer(value: object, names: Sequence[str]) -> Answer:
    """Return the answer to messages from members ``names``, one reply about each; WireError if malformed."""
    answer = from_json(EncodedAnswer, value, "the answer", is_open=True)
    if len(answer.replies) != len(names):
        raise WireError(f"{len(answer.replies)} answers came to {len(names)} messages")
    replies: list[Reply] = []
    for place, (name, one) in enumerate(zip(names, answer.replies, strict=True)):
        if one.leases_of is not None and one.leases_of >= place:
            raise WireError(f"the answer.replies[{place}].leases_of is not the place of an earlier reply")
        source = one if one.leases_of is None else replies[one.leases_of]
        replies.append(Reply(one.outcome, one.member, source.leases, source.due_in_s, one.detail))
        _check_is_for(name, replies[-1])
    return Answer(answer.ttl_s, tuple(replies))


def decode_reply(value: object) -> Reply:
    """Return an encoded reply as a value; WireError if it is malformed."""
    return from_json(Reply, value, "a reply", is_open=True)


def check_listing(value: object) -> Mapping[str, Any]:
    """Return the same value, if it is a ``Listing``; WireError otherwise."""
    from_json(Listing, value, "the listing", is_open=True)
    return cast(Mapping[str, Any], value)


def _check_is_for(name: str, reply: Reply) -> None:
    if reply.member is not None and reply.member.name != name:
        raise WireError(f"a reply to {name} is about another member")
    if any(name not in (lease.producer, lease.consumer) for lease in reply.leases):
        raise WireError(f"a reply to {name} has a lease of others")
