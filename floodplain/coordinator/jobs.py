"""Jobs for the worker: handle messages, forget a device, and read all rows for listings and metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from floodplain.coordinator.service import Job, LeaseService
from floodplain.core.codec import to_json
from floodplain.leases.book import UNRESTRICTED, LeaseBook, Speaker
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import ENDED, Lease, LeaseId, LeaseState, Outcome


@dataclass(frozen=True, slots=True)
class BookView:
    """The rows of a book at one moment; immutable, so that another thread can encode them.

    Attributes:
        members: All; each with whether it is considered alive, and its leased bytes.
        leases: Those that have not ended.
        due_in_s: For recalled leases, the seconds left.
        granted_unix_s: When each was granted, without those granted in the same transaction.
        taken_unix_s: When the rows were read.
    """

    members: Sequence[tuple[Member, bool, int]]
    leases: Sequence[Lease]
    due_in_s: Mapping[LeaseId, float]
    granted_unix_s: Mapping[LeaseId, float]
    taken_unix_s: float

    def granted_at(self, lease: Lease) -> float:
        """Return when a lease was granted, as Unix time."""
        return self.granted_unix_s.get(lease.lease_id, self.taken_unix_s)


MAX_TOLD_LEASES = 16_384
"""The most leases in an answer: about 5 MB. A member that lends and borrows all that it may has a third of that."""


@dataclass(frozen=True, slots=True)
class TooManyLeases:
    """The answer to a batch whose replies would list too many leases; nothing of the batch is done.

    Attributes:
        num_leases: About how many the replies would list.
    """

    num_leases: int


def handle(messages: Sequence[Message], answered: Counter[tuple[str, Outcome]], speaker: Speaker = UNRESTRICTED) -> Job:
    """Return a job that handles messages in their order; its answer is their replies, or ``TooManyLeases``.

    Args:
        messages: From members.
        answered: Counts the outcomes of each kind of message.
        speaker: What the sender may do.
    """

    def job(book: LeaseBook, now: float) -> list[Reply] | TooManyLeases:
        num_told = book.count_told(messages)
        if num_told > MAX_TOLD_LEASES:
            return TooManyLeases(num_told)
        replies = book.handle_all(messages, now, speaker)
        answered.update((type(m).__name__.lower(), r.outcome) for m, r in zip(messages, replies, strict=True))
        return replies

    return job


def forget(name: str) -> Job:
    """Return a job that forgets a device that will not come back; its answer is a reply."""
    return lambda book, now: book.forget(name)


def look(service: LeaseService) -> Job:
    """Return a job whose answer is a ``BookView``."""

    def job(book: LeaseBook, now: float) -> BookView:
        living, rows = book.roster.living, book.rows
        members = [(member, name in living, rows.leased_bytes(name)) for name, member in rows.members.items()]
        return BookView(
            members, list(rows.leases.values()), book.due_in_s(now), dict(service.granted_unix_s), time.time()
        )

    return job


def encode_view(view: BookView, ttl_s: float) -> dict[str, Any]:
    """Return a ``Listing`` for ``json.dumps``: members by name, leases by age."""
    by_age = sorted(view.leases, key=lambda lease: (view.granted_at(lease), lease.lease_id))
    return {
        "ttl_s": ttl_s,
        "members": [
            {**to_json(member), "is_living": is_living, "leased_bytes": leased_bytes}
            for member, is_living, leased_bytes in sorted(view.members, key=lambda row: row[0].name)
        ],
        "leases": [
            {
                **to_json(lease),
                "granted_unix_s": view.granted_at(lease),
                "due_in_s": view.due_in_s.get(lease.lease_id),
            }
            for lease in by_age
        ],
    }


def count_leases(view: BookView) -> Mapping[LeaseState, tuple[int, int]]:
    """Return (number, bytes) of the leases in each state, without the states of ended leases."""
    return {
        state: (len(some), sum(lease.num_bytes for lease in some))
        for state in LeaseState
        if state not in ENDED
        for some in [[lease for lease in view.leases if lease.state is state]]
    }
