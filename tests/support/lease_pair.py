"""A lease book with one producer and one consumer, for tests by example."""

from __future__ import annotations

from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Heartbeat, Join, Leave, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.rules import DEFAULT_LIMITS, LeaseLimits
from floodplain.leases.states import (
    Lease,
    LeaseEvent,
    Outcome,
    Stamp,
)

TTL_S = 10.0


class LeasePair:
    """A producer that has offered bytes, and a consumer, in one book; short names for their messages."""

    def __init__(self, limits: LeaseLimits = DEFAULT_LIMITS) -> None:
        self.book = LeaseBook(TTL_S, now=0.0, limits=limits)
        self.now = 0.0
        for name in ("p", "c"):
            assert self.say(Join(name, f"{name}-1")).outcome is Outcome.APPLIED
        assert self.say(Offer("p", self.row("p").stamp, 10)).outcome is Outcome.APPLIED

    def say(self, message: Join | Leave | Heartbeat | Offer | Recall | Observe | Request | Report) -> Reply:
        reply = self.book.handle(message, self.now)
        self.book.rows.check_integrity()
        return reply

    def row(self, name: str) -> Member:
        return self.book.rows.members[name]

    def grant(self, number: int, *sizes: int) -> list[Lease]:
        reply = self.say(Request("c", self.row("c").generation, number, tuple(Shard(size) for size in sizes)))
        return list(reply.leases)

    def report(self, lease: Lease, event: LeaseEvent) -> Reply:
        known = self.book.rows.leases[lease.lease_id]
        return self.say(Report("c", lease.lease_id, Stamp(known.generation, known.revision), event))

    def observe(self, foreign_bytes: int) -> Reply:
        return self.say(Observe("p", self.row("p").stamp, foreign_bytes))
