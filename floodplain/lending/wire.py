"""Messages and answers as JSON. Standard library only: agents use it on bare GPU images.

A message is an object of its fields and its ``kind``; stamps and shards are nested objects. ``decode_...`` returns
values whose types and ranges are checked, or raises ``WireError``. Unknown fields are ignored: the coordinator may be
newer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome
from floodplain.lending.fields import IDENTITY, MARK, MAX_SECONDS, NAME, REASON, WireError, WireFields

LEAST_TTL_S, MOST_TTL_S = 1e-3, 3600.0
"""The range of TTLs that a coordinator may have."""
MAX_UNIX_S = 1e11
"""The year 5138."""

_MEMBER_FIELDS = tuple(field.name for field in fields(Member))
_LEASE_FIELDS = tuple(field.name for field in fields(Lease))
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}
_STATES = {state.value: state for state in LeaseState}


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to a batch of messages.

    Attributes:
        ttl_s: Seconds of silence after which it considers a member dead.
        replies: In the order of the messages.
    """

    ttl_s: float
    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True)
class News:
    """Whether a member should ask for its leases now (``coordinator.news``).

    Attributes:
        mark: To be sent with the next request for news.
        has_news: Whether a lease of the member may have changed since the mark that it sent.
    """

    mark: str
    has_news: bool


def encode_news(news: News) -> dict[str, Any]:
    """Return news as an object that ``json.dumps`` takes."""
    return asdict(news)


def decode_news(value: object) -> News:
    """Return encoded news as a value.

    Raises:
        WireError: It is malformed.
    """
    news = WireFields(value, "the news")
    return News(news.text("mark", MARK), news.flag("has_news"))


def encode_message(message: Message) -> dict[str, Any]:
    """Return a message as an object that ``json.dumps`` takes."""
    values = {name: value.value if isinstance(value, LeaseEvent) else value for name, value in asdict(message).items()}
    return {"kind": type(message).__name__.lower(), **values}


def encode_member(member: Member) -> dict[str, Any]:
    """Return a member's row as an object."""
    return {name: getattr(member, name) for name in _MEMBER_FIELDS}


def encode_lease(lease: Lease) -> dict[str, Any]:
    """Return a lease's row as an object."""
    row = {name: getattr(lease, name) for name in _LEASE_FIELDS}
    row["state"] = lease.state.value
    return row


def encode_reply(reply: Reply) -> dict[str, Any]:
    """Return a reply as an object."""
    return {
        "outcome": reply.outcome.value,
        "member": None if reply.member is None else encode_member(reply.member),
        "leases": [encode_lease(lease) for lease in reply.leases],
        "due_in_s": dict(reply.due_in_s),
        "detail": reply.detail,
    }


def encode_replies(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Return the replies to a batch. Leases that several share (``LeaseBook.handle_all``) are only in the first.

    The others have ``leases_of``, the place of that first one.
    """
    first: dict[int, int] = {}
    encoded = []
    for place, reply in enumerate(replies):
        shared = first.setdefault(id(reply.leases), place)
        if not reply.leases or shared == place:
            encoded.append(encode_reply(reply))
        else:
            encoded.append({**encode_reply(replace(reply, leases=(), due_in_s={})), "leases_of": shared})
    return encoded


def decode_answer(value: object, names: Sequence[str]) -> Answer:
    """Return the answer to a batch of messages.

    Args:
        value: As it was parsed.
        names: Of the members that the messages were from. A reply must be about its message's member.

    Raises:
        WireError: It is malformed.
    """
    answer = WireFields(value, "the answer")
    replies: list[Reply] = []
    for one in answer.items("replies"):
        reply = decode_reply(one)
        shared = one.get("leases_of")
        if shared is not None:
            if type(shared) is not int or not 0 <= shared < len(replies):
                raise WireError("leases_of of a reply is not the place of an earlier one")
            reply = replace(reply, leases=replies[shared].leases, due_in_s=replies[shared].due_in_s)
        replies.append(reply)
    if len(replies) != len(names):
        raise WireError(f"{len(replies)} answers came to {len(names)} messages")
    for name, reply in zip(names, replies, strict=True):
        _check_is_for(name, reply)
    return Answer(answer.seconds("ttl_s", LEAST_TTL_S, MOST_TTL_S), tuple(replies))


def decode_reply(value: object) -> Reply:
    """Return an encoded reply as a value.

    Raises:
        WireError: It is malformed.
    """
    reply = WireFields(value, "a reply")
    return Reply(
        outcome=reply.one_of("outcome", _OUTCOMES),
        member=None if reply.get("member") is None else decode_member(reply.get("member")),
        leases=tuple(decode_lease(row) for row in reply.items("leases")),
        due_in_s=_decode_times(reply.mapping("due_in_s")),
        detail=reply.line("detail"),
    )


def decode_member(value: object) -> Member:
    """Return an encoded member's row as a value.

    Raises:
        WireError: It is malformed.
    """
    row = WireFields(value, "a member")
    return Member(
        name=row.text("name", NAME),
        instance=row.text("instance", IDENTITY) if row.get("instance") != "" else "",
        generation=row.count("generation", 1),
        revision=row.count("revision", 1),
        offered_bytes=row.count("offered_bytes"),
        last_request=row.count("last_request"),
        is_gone=row.flag("is_gone"),
        is_lender=row.flag("is_lender", default=False),  # older coordinators lack these, and members need neither
        hidden_bytes=row.count("hidden_bytes", default=0),
    )


def decode_lease(value: object) -> Lease:
    """Return an encoded lease's row as a value.

    Raises:
        WireError: It is malformed.
    """
    row = WireFields(value, "a lease")
    return Lease(
        lease_id=LeaseId(row.text("lease_id", IDENTITY)),
        request=row.count("request", 1),
        producer=row.text("producer", NAME),
        consumer=row.text("consumer", NAME),
        num_bytes=row.count("num_bytes", 1),
        generation=row.count("generation", 1),
        state=row.one_of("state", _STATES),
        revision=row.count("revision", 1),
        held_bytes=row.count("held_bytes"),
        deadline_s=None if row.get("deadline_s") is None else row.seconds("deadline_s"),
        reason=row.text("reason", REASON),
    )


def check_listing(value: object) -> Mapping[str, Any]:
    """Return the same value, if it is a ``Listing``.

    Raises:
        WireError: It is not.
    """
    listing = WireFields(value, "the listing")
    for one in listing.items("members"):
        decode_member(one)
        row = WireFields(one, "a member")
        row.flag("is_living")
        row.count("leased_bytes")
    for one in listing.items("leases"):
        decode_lease(one)
        row = WireFields(one, "a lease")
        row.seconds("granted_unix_s", most=MAX_UNIX_S)
        if row.get("due_in_s") is not None:
            row.seconds("due_in_s", -MAX_UNIX_S, MAX_SECONDS)
    assert isinstance(value, Mapping)
    return value


def _decode_times(values: Mapping[str, Any]) -> Mapping[LeaseId, float]:
    if not all(IDENTITY.fullmatch(lease_id) for lease_id in values):
        raise WireError(f"a key of due_in_s is not a string like {IDENTITY.pattern}")
    times = WireFields(values, "due_in_s")
    return {LeaseId(lease_id): times.seconds(lease_id) for lease_id in values}


def _check_is_for(name: str, reply: Reply) -> None:
    if reply.member is not None and reply.member.name != name:
        raise WireError(f"a reply to {name} is about another member")
    if any(name not in (lease.producer, lease.consumer) for lease in reply.leases):
        raise WireError(f"a reply to {name} has a lease of others")
