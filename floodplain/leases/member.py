"""A member's side of the lease protocol: what it knows of itself and of its leases. Sans-IO.

Whoever drives it sends ``greeting``, and what ``Lender`` and ``Borrower`` have to say, every few seconds, and hands
every answer to ``learn``. Nothing is lost if an answer never comes: what was not confirmed is said again.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.leases.messages import Heartbeat, Join, Message, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.states import Lease, LeaseId, LeaseState, Outcome, Stamp, judge_copy


@dataclass(slots=True)
class KnownLease:
    """A lease as a member has heard of it.

    Attributes:
        lease: The newest row that came.
        learned_s: When its first row came.
        due_s: Recalled: when its bytes must be free.
    """

    lease: Lease
    learned_s: float
    due_s: float = float("inf")


class MemberSide:
    """What a process knows. Times are of its own monotonic clock.

    Args:
        name: Of its device.
        instance: Drawn at its start.
        ttl_s: The coordinator's.

    Attributes:
        row: Its row as it knows it; None before it has joined for the first time.
        known: Leases that it lends or borrows, as far as it has heard of them and not of their end.
        open_requests: What it has asked for and may still be granted, by number.
        has_joined: Whether it lives, as far as it knows.
    """

    def __init__(self, name: str, instance: str, ttl_s: float) -> None:
        self.name, self.instance, self.ttl_s = name, instance, ttl_s
        self.row: Member | None = None
        self.known: dict[LeaseId, KnownLease] = {}
        self.open_requests: dict[int, tuple[Shard, ...]] = {}
        self.has_joined = False
        self._alive_until_s = float("-inf")
        self._told_s = float("-inf")

    @property
    def stamp(self) -> Stamp:
        """Its row as it knows it."""
        return self.row.stamp if self.row is not None else Stamp(0, 0)

    def borrowed(self) -> list[Lease]:
        """Leases that it was granted, in this life or an earlier one."""
        return [known.lease for known in self.known.values() if known.lease.consumer == self.name]

    def lent(self) -> list[Lease]:
        """Leases of bytes of its device."""
        return [known.lease for known in self.known.values() if known.lease.producer == self.name]

    def is_surely_alive(self, now: float) -> bool:
        """Whether the coordinator must still take it for alive: then what it granted is kept for it.

        It counts from when it sent the last heartbeat that was answered, which the coordinator got later.
        """
        return self.has_joined and now <= self._alive_until_s

    def may_allocate(self, lease: Lease, now: float) -> bool:
        """Whether a lease is granted to it, and kept for it."""
        is_mine = lease.consumer == self.name and lease.generation == self.stamp.generation
        return is_mine and lease.state is LeaseState.GRANTED and self.is_surely_alive(now)

    def greeting(self) -> Join | Heartbeat:
        """What it says of itself at every beat."""
        return Heartbeat(self.name, self.stamp.generation) if self.has_joined else Join(self.name, self.instance)

    def learn(self, message: Message, reply: Reply, sent_s: float, now: float) -> None:
        """An answer came, at ``now``, to a message that was sent at ``sent_s``; perhaps late, perhaps once more.

        A lease that has ended and is forgotten must not come back with a late answer, or it would be allocated twice.
        So leases that are new here are believed only in lists that were asked for after the last such list came: of two
        that were under way together nobody here knows which one the coordinator wrote first.
        """
        self._learn_row(reply.member)
        is_news = self._learn_life(message, reply, sent_s, now) or (
            isinstance(message, Request) and message.number in self.open_requests
        )
        if isinstance(message, Request) and self._is_overtaken(message, reply):
            self.open_requests.pop(message.number, None)
        for lease in reply.leases:
            if is_news or lease.lease_id in self.known:
                self._learn_lease(lease, reply.due_in_s.get(lease.lease_id), sent_s, now)

    def _is_overtaken(self, request: Request, reply: Reply) -> bool:
        """Whether a request can never be granted: a later one of this life was, or it was itself and has ended."""
        row = reply.member
        if reply.outcome is not Outcome.STALE or row is None or request.number > row.last_request:
            return False
        return request.generation == row.generation == self.stamp.generation

    def _learn_row(self, row: Member | None) -> None:
        if row is None or row.name != self.name or row.instance != self.instance:
            return
        if self.row is None or row.revision > self.row.revision:
            self.row = row

    def _learn_life(self, message: Message, reply: Reply, sent_s: float, now: float) -> bool:
        """Whether this is surely the newest list of everything that concerns it."""
        if not isinstance(message, Join | Heartbeat):
            return False
        if reply.outcome is not Outcome.APPLIED:
            if isinstance(message, Heartbeat) and message.generation == self.stamp.generation:
                self.has_joined = False
            return False
        self.has_joined = True
        self._alive_until_s = max(self._alive_until_s, sent_s + self.ttl_s)
        if sent_s <= self._told_s:
            return False
        self._told_s = now
        told = {lease.lease_id for lease in reply.leases}
        self.known = {i: known for i, known in self.known.items() if i in told or known.learned_s >= sent_s}
        return True

    def _learn_lease(self, lease: Lease, due_in_s: float | None, sent_s: float, now: float) -> None:
        known = self.known.setdefault(lease.lease_id, KnownLease(lease, now))
        if judge_copy(lease, known.lease) is Outcome.APPLIED:
            known.lease = lease
        if due_in_s is not None:
            known.due_s = min(known.due_s, sent_s + due_in_s)
        if lease.consumer == self.name and lease.generation == self.stamp.generation:
            self.open_requests.pop(lease.request, None)
