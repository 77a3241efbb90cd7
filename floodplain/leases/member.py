"""A member's side of the lease protocol: what it knows of itself and of its leases. Sans-IO.

The caller sends ``greeting`` and the messages of ``Lender`` and ``Borrower`` every few seconds, and passes every answer
to ``learn``. Answers may be lost: what was not confirmed is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.leases.messages import Heartbeat, Join, Message, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.states import Lease, LeaseId, LeaseState, Outcome, Stamp, judge_copy


@dataclass(slots=True)
class KnownLease:
    """A lease as far as a member knows it.

    Attributes:
        lease: The newest row received.
        learned_s: When the first row was received.
        due_s: If recalled: when the bytes must be free.
    """

    lease: Lease
    learned_s: float
    due_s: float = float("inf")


class MemberSide:
    """The protocol state of one process. Times are of its own monotonic clock.

    Args:
        name: Of its device.
        instance: Drawn at its start.
        ttl_s: The coordinator's.

    Attributes:
        row: Its newest row; None before it has joined for the first time.
        known: Leases that it lends or borrows and that, as far as it knows, have not ended.
        open_requests: Requests that may still be granted, by number.
        has_joined: Whether it is joined and alive, as far as it knows.
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
        """Return generation and revision of its newest row; zeros before it has joined."""
        return self.row.stamp if self.row is not None else Stamp(0, 0)

    def borrowed(self) -> list[Lease]:
        """Return leases that were granted to it, in this life or an earlier one."""
        return [known.lease for known in self.known.values() if known.lease.consumer == self.name]

    def lent(self) -> list[Lease]:
        """Return leases of bytes of its device."""
        return [known.lease for known in self.known.values() if known.lease.producer == self.name]

    def is_surely_alive(self, now: float) -> bool:
        """Whether the coordinator must still consider it alive, and so keeps what it granted.

        Counts from the sending of the last answered heartbeat, which the coordinator received later.
        """
        return self.has_joined and now <= self._alive_until_s

    def may_allocate(self, lease: Lease, now: float) -> bool:
        """Whether the lease is granted to this life of the member, and surely still kept for it."""
        is_mine = lease.consumer == self.name and lease.generation == self.stamp.generation
        return is_mine and lease.state is LeaseState.GRANTED and self.is_surely_alive(now)

    def greeting(self) -> Join | Heartbeat:
        """Return the message of every beat: a join, or a heartbeat once it has joined."""
        return Heartbeat(self.name, self.stamp.generation) if self.has_joined else Join(self.name, self.instance)

    def learn(self, message: Message, reply: Reply, sent_s: float, now: float) -> None:
        """Apply an answer that arrived at ``now`` to a message sent at ``sent_s``; it may be late or a duplicate.

        A late answer must not bring back a lease that has ended and is forgotten, or it would be allocated twice. So
        unknown leases are accepted only from lists requested after the last such list arrived: of two lists that were
        under way together, this side cannot know which one the coordinator wrote first.
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
        """Whether the request can never be granted: a later one of this life was, or its own leases have ended."""
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
        """Apply what the answer says of this life; True if it is surely the newest list of all of its leases."""
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
