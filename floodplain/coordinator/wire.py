"""Messages and answers as JSON. Standard library only: agents use it on bare GPU images.

A message is an object of its fields with its ``kind`` beside them; stamps and shards are objects of theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from floodplain.core.leases.messages import Message
from floodplain.core.leases.rows import Member, Reply
from floodplain.core.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome

_MEMBER_FIELDS = tuple(field.name for field in fields(Member))
_LEASE_FIELDS = tuple(field.name for field in fields(Lease))


def encode_message(message: Message) -> dict[str, Any]:
    """A message as an object that ``json.dumps`` takes."""
    values = {name: value.value if isinstance(value, LeaseEvent) else value for name, value in asdict(message).items()}
    return {"kind": type(message).__name__.lower(), **values}


def encode_member(member: Member) -> dict[str, Any]:
    """A member's row."""
    return {name: getattr(member, name) for name in _MEMBER_FIELDS}


def encode_lease(lease: Lease) -> dict[str, Any]:
    """A lease's row."""
    row = {name: getattr(lease, name) for name in _LEASE_FIELDS}
    row["state"] = lease.state.value
    return row


def encode_reply(reply: Reply) -> dict[str, Any]:
    """An answer."""
    return {
        "outcome": reply.outcome.value,
        "member": None if reply.member is None else encode_member(reply.member),
        "leases": [encode_lease(lease) for lease in reply.leases],
        "due_in_s": dict(reply.due_in_s),
        "detail": reply.detail,
    }


def decode_lease(row: Mapping[str, Any]) -> Lease:
    """A lease's row, as it was encoded.

    Raises:
        KeyError, ValueError: It is no such row. A field that is unknown here is left out: the coordinator may be newer.
    """
    known = {name: row[name] for name in _LEASE_FIELDS}
    return Lease(**{**known, "state": LeaseState(row["state"])})


def check_listing(listing: Mapping[str, Any]) -> None:
    """See whether an answer is a ``Listing``.

    Raises:
        KeyError, TypeError: It is none.
    """
    members, leases = listing["members"], listing["leases"]
    wanted = (*_MEMBER_FIELDS, "is_living", "leased_bytes"), (*_LEASE_FIELDS, "granted_unix_s", "due_in_s")
    for rows, names in zip((members, leases), wanted, strict=True):
        for row in rows:
            operator.itemgetter(*names)(row)


def decode_reply(answer: Mapping[str, Any]) -> Reply:
    """An answer, as it was encoded.

    Raises:
        KeyError, TypeError, ValueError: It is no such answer.
    """
    member = answer["member"]
    return Reply(
        outcome=Outcome(answer["outcome"]),
        member=None if member is None else Member(**{name: member[name] for name in _MEMBER_FIELDS}),
        leases=tuple(decode_lease(row) for row in answer["leases"]),
        due_in_s={LeaseId(lease_id): float(due_s) for lease_id, due_s in answer["due_in_s"].items()},
        detail=str(answer["detail"]),
    )
