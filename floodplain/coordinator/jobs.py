"""What is asked of the clerk: messages to handle, a device to forget, everything to list, and what metrics count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from floodplain.coordinator.service import Job, LeaseService
from floodplain.leases.book import ANYBODY, LeaseBook, Speaker
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import ENDED, Lease, LeaseId, LeaseState, Outcome
from floodplain.lending.wire import encode_lease, encode_member


@dataclass(frozen=True, slots=True)
class BookView:
    """The rows of a book at one moment; immutable, so that another thread may turn them into text.

    Attributes:
        members: All, and whether each is taken for alive, and its leased bytes.
        leases: Those that have not ended.
        due_in_s: For those that are recalled, the seconds left.
        granted_unix_s: When each was granted, but for those that were granted with this very look.
        taken_unix_s: When the look was taken.
    """

    members: Sequence[tuple[Member, bool, int]]
    leases: Sequence[Lease]
    due_in_s: Mapping[LeaseId, float]
    granted_unix_s: Mapping[LeaseId, float]
    taken_unix_s: float

    def granted_at(self, lease: Lease) -> float:
        """When a lease was granted, as Unix time."""
        return self.granted_unix_s.get(lease.lease_id, self.taken_unix_s)


MAX_TOLD_LEASES = 16_384
"""That an answer lists: about 5 MB. A member that lends and borrows all that it may has a third of that."""


@dataclass(frozen=True, slots=True)
class TooManyLeases:
    """What a batch is answered whose answer would list too many leases; nothing of it is done.

    Attributes:
        num_leases: As many.
    """

    num_leases: int


def handle(messages: Sequence[Message], answered: Counter[tuple[str, Outcome]], speaker: Speaker = ANYBODY) -> Job:
    """Have messages handled in their order; the answer is their replies, or ``TooManyLeases``.

    Args:
        messages: What members say.
        answered: Counts what became of each, by its kind.
        speaker: Who sends them.
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
    """A device will not come back; the answer is a reply."""
    return lambda book, now: book.forget(name)


def look(service: LeaseService) -> Job:
    """The answer is a ``BookView``."""

    def job(book: LeaseBook, now: float) -> BookView:
        living, rows = book.roster.living, book.rows
        members = [(member, name in living, rows.leased_bytes(name)) for name, member in rows.members.items()]
        return BookView(
            members, list(rows.leases.values()), book.due_in_s(now), dict(service.granted_unix_s), time.time()
        )

    return job


def encode_view(view: BookView, ttl_s: float) -> dict[str, Any]:
    """A ``Listing`` for ``json.dumps``: members by name, leases by age."""
    by_age = sorted(view.leases, key=lambda lease: (view.granted_at(lease), lease.lease_id))
    return {
        "ttl_s": ttl_s,
        "members": [
            {**encode_member(member), "is_living": is_living, "leased_bytes": leased_bytes}
            for member, is_living, leased_bytes in sorted(view.members, key=lambda row: row[0].name)
        ],
        "leases": [
            {
                **encode_lease(lease),
                "granted_unix_s": view.granted_at(lease),
                "due_in_s": view.due_in_s.get(lease.lease_id),
            }
            for lease in by_age
        ],
    }


def count_leases(view: BookView) -> Mapping[LeaseState, tuple[int, int]]:
    """(how many, their bytes) of the leases in each state but those in which they have ended."""
    return {
        state: (len(some), sum(lease.num_bytes for lease in some))
        for state in LeaseState
        if state not in ENDED
        for some in [[lease for lease in view.leases if lease.state is state]]
    }
