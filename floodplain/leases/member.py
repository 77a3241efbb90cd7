"""A member's side of the lease protocol: its row and its leases as far as it has learned. Sans-IO.

The caller sends ``greeting`` and the messages of ``Lender`` and ``Borrower`` every few seconds, and passes every answer
to ``learn``. Answers may be lost: what was not confirmed is sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floodplain.leases.messages import Heartbeat, Join, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome, Stamp, judge_copy


@dataclass(slots=True)
class KnownLease:
    """A lease's newest row that was received, when the first one was, and when recalled bytes must be free."""

    lease: Lease
    learned_s: float
    due_s: float = float("inf")


class MemberSide:
    """The protocol state of one process. Times are of its own monotonic clock.

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
        """Return the stamp of its newest row; zeros before it has joined."""
        return self.row.stamp if self.row is not None else Stamp(0, 0)

    def borrowed(self) -> list[Lease]:
        """Return leases that were granted to it, in this life or an earlier one."""
        return [known.lease for known in self.known.values() if known.lease.consumer == self.name]

    def lent(self) -> list[Lease]:
        """Return leases of bytes of its device."""
        return [known.lease for known in self.known.values() if known.lease.producer == self.name]

    def is_surely_alive(self, now: float) -> bool:
        """Whether the coordinator must still consider it alive: for a TTL from the sending of an answered beat."""
        return self.has_joined and now <= self._alive_until_s

    def may_allocate(self, lease: Lease, now: float) -> bool:
        """Whether the lease is granted to this life of the member, and surely still kept for it."""
        is_mine = lease.consumer == self.name and lease.generation == self.stamp.generation
        return is_mine and lease.state is LeaseState.GRANTED and self.is_surely_alive(now)

    def greeting(self) -> Join | Heartbeat:
        """Return the message of every beat."""
        return Heartbeat(self.name, self.stamp.generation) if self.has_joined else Join(self.name, self.instance)

    def learn(self, message: Message, reply: Reply, sent_s: float, now: float) -> None:
        """Apply an answer that arrived at ``now`` to a message sent at ``sent_s``; it may be late or a duplicate.

        A late answer must not bring back a lease that has ended and is forgotten, or it would be allocated twice. So
        unknown leases are accepted only from lists requested after the last such list arrived.
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


# -- the producer ------------------------------------------------------------------------------------------------------


class Lender:
    """Chooses the next offer, recall, or observation of one producer.

    The engine sets ``target_bytes``, how much to lend. It shrinks its pool before it offers bytes, and grows it only by
    bytes that are no longer promised. Consumers get ``deadline_s`` seconds to free recalled bytes.
    """

    def __init__(self, member: MemberSide, capacity_bytes: int, deadline_s: float) -> None:
        self.member = member
        self.capacity_bytes = capacity_bytes
        self.deadline_s = deadline_s
        self.target_bytes = 0
        self._offered = (Stamp(0, 0), 0)

    @property
    def promised_bytes(self) -> int:
        """Return the bytes to leave to others: what is offered, or may be by a message that is under way.

        Before it has joined, the whole capacity: what an earlier process of its name promised is unknown.
        """
        row = self.member.row
        return self.capacity_bytes if row is None else max(row.offered_bytes, self._offered_at(row.stamp))

    @property
    def returning_bytes(self) -> int:
        """Return the bytes that are recalled or owed: still offered, but not granted to any consumer."""
        lent = self.member.lent()
        return sum(lease.num_bytes for lease in lent if lease.is_owed or lease.state is LeaseState.RECALLED)

    def say(self, own_bytes: int, foreign_bytes: int) -> Recall | Observe | Offer | None:
        """Return the next message: recall bytes, else observe bytes free, else offer bytes; None if there is none.

        An offer without an answer may still arrive. If less is to be lent by now, the present offer is sent again: the
        one of the two that arrives second is stale. ``own_bytes`` of the device are its own pool's; others hold
        ``foreign_bytes``, read after the last answer arrived.
        """
        row = self.member.row
        if row is None or not self.member.has_joined:
            return None
        wanted = self.target_bytes + self.returning_bytes
        if wanted < row.offered_bytes:
            return Recall(row.name, row.stamp, row.offered_bytes - wanted, self.deadline_s)
        if self._is_settled(foreign_bytes):
            return Observe(row.name, row.stamp, foreign_bytes)
        wanted = max(min(wanted, self.capacity_bytes - own_bytes), row.offered_bytes)
        if wanted == self.promised_bytes == row.offered_bytes:
            return None
        self._offered = (row.stamp, max(wanted, self._offered_at(row.stamp)))
        return Offer(row.name, row.stamp, wanted)

    def say_last(self, foreign_bytes: int) -> Offer | Observe | None:
        """Return the next message before the process ends: withdraw unleased bytes, else observe owed bytes free.

        Without the observation, what consumers have freed stays owed until another engine of this name starts.
        """
        row = self.member.row
        if row is None or not self.member.has_joined:
            return None
        leased = sum(lease.num_bytes for lease in self.member.lent() if not lease.has_ended)
        if leased < self.promised_bytes:
            return Offer(row.name, row.stamp, leased)
        return Observe(row.name, row.stamp, foreign_bytes) if self._is_settled(foreign_bytes) else None

    @property
    def has_said_all(self) -> bool:
        """Whether only bytes that consumers count on are offered: then the process can end without more messages."""
        row = self.member.row
        counted_on = sum(lease.num_bytes for lease in self.member.lent() if not (lease.is_owed or lease.has_ended))
        return row is None or self.promised_bytes == counted_on

    def _offered_at(self, stamp: Stamp) -> int:
        """Return the most bytes offered while the row had this stamp: each of those offers may still arrive."""
        of_row, most_bytes = self._offered
        return most_bytes if of_row == stamp else 0

    def _is_settled(self, foreign_bytes: int) -> bool:
        """Whether ``foreign_bytes`` proves that at least one owed lease is free."""
        lent = self.member.lent()
        owed = [lease.num_bytes for lease in lent if lease.is_owed]
        allocated = sum(lease.held_bytes for lease in lent if not lease.is_owed)
        return bool(owed) and sum(owed) - max(0, foreign_bytes - allocated) >= min(owed)


# -- the consumer ------------------------------------------------------------------------------------------------------


_TO_SAY = {
    LeaseEvent.HOLD: (LeaseEvent.HOLD,),
    LeaseEvent.REFUSE: (LeaseEvent.REFUSE, LeaseEvent.RELEASE),
    LeaseEvent.RELEASE: (LeaseEvent.RELEASE,),
}
"""What to report of a lease that was allocated, refused, or freed: the first event that its state allows."""


class Borrower:
    """Tracks the requests and leases of one consumer process.

    A lease is allocated once and freed once. After a recall the engine has until ``due_s`` to copy away what it needs.
    """

    def __init__(self, member: MemberSide) -> None:
        self.member = member
        self._last_number = self._last_said = 0
        self._done: dict[LeaseId, tuple[LeaseEvent, str]] = {}
        self._too_late: set[LeaseId] = set()

    def ask(self, shards: Sequence[Shard]) -> int:
        """Request all of these shards until granted or cancelled; return the request's number.

        If a later request is granted first, the earlier one ends (it leaves the member's ``open_requests``), and must
        be requested again: numbers that are granted only rise.
        """
        self._last_number += 1
        self.member.open_requests[self._last_number] = tuple(shards)
        return self._last_number

    def cancel(self, number: int) -> None:
        """Cancel a request. If a copy of it is still granted, the leases appear in ``to_allocate``."""
        self.member.open_requests.pop(number, None)

    def to_allocate(self, now: float) -> list[Lease]:
        """Return leases that are granted and untouched, and that the coordinator still keeps for this process."""
        leases = self.member.borrowed()
        return [lease for lease in leases if lease.lease_id not in self._done and self.member.may_allocate(lease, now)]

    def to_free(self) -> dict[LeaseId, float]:
        """Return allocated leases that must be freed, and by when: immediately (-inf) if they have ended."""
        return {i: self._due_s(i) for i in self.allocated_ids if not self._is_mine(i)}

    def is_untouched(self, lease: Lease) -> bool:
        """Whether the lease was granted in this life, and neither allocated nor refused."""
        return lease.state is LeaseState.GRANTED and self._is_of_this_life(lease) and lease.lease_id not in self._done

    @property
    def allocated_ids(self) -> list[LeaseId]:
        """Return leases whose bytes are allocated."""
        return [lease_id for lease_id, (event, _) in self._done.items() if event is LeaseEvent.HOLD]

    def allocated(self, lease_id: LeaseId, now: float) -> bool:
        """Record that the bytes were allocated at ``now``; False if the lease has expired meanwhile: then free them."""
        self._done[lease_id] = (LeaseEvent.HOLD, "")
        if not self.member.is_surely_alive(now):
            self._too_late.add(lease_id)
        return self._is_mine(lease_id)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Record that the bytes could not be allocated, or are not needed any more."""
        self._done[lease_id] = (LeaseEvent.REFUSE, reason)

    def freed(self, lease_id: LeaseId) -> None:
        """Record that the bytes are free again."""
        self._done[lease_id] = (LeaseEvent.RELEASE, "")
        self._too_late.discard(lease_id)

    def say(self, most: int | None = None) -> list[Request | Report]:
        """Return unconfirmed messages, at most ``most``: reports, then requests; the next call has the rest."""
        known = self.member.known
        for lease in self.member.borrowed():
            if lease.state is LeaseState.RECALLED and self._is_of_this_life(lease) and lease.lease_id not in self._done:
                self.freed(lease.lease_id)  # recalled before it was allocated
        self._done = {i: done for i, done in self._done.items() if i in known or done[0] is LeaseEvent.HOLD}
        reports = (self._report(known[i].lease, *done) for i, done in self._done.items() if i in known)
        said = [report for report in reports if report is not None][:most]
        return [*said, *self._requests(None if most is None else most - len(said))]

    def _requests(self, most: int | None) -> list[Request]:
        """Return open requests by number; if the last call cut the list at ``most``, those after the cut."""
        if not self.member.has_joined:
            return []
        name, generation, wanted = self.member.name, self.member.stamp.generation, self.member.open_requests
        numbers = [number for number in wanted if most is None or number > self._last_said]
        self._last_said = 0
        if most is not None and len(numbers) > most:
            numbers = numbers[:most]
            self._last_said = numbers[-1] if numbers else 0
        return [Request(name, generation, number, wanted[number]) for number in numbers]

    def _report(self, lease: Lease, done: LeaseEvent, reason: str) -> Report | None:
        event = next((event for event in _TO_SAY[done] if lease.allows(event)), None)
        if event is None:
            return None
        return Report(self.member.name, lease.lease_id, Stamp(lease.generation, lease.revision), event, reason)

    def _is_mine(self, lease_id: LeaseId) -> bool:
        known = self.member.known.get(lease_id)
        if known is None or not self.member.has_joined or not self._is_of_this_life(known.lease):
            return False
        return known.lease.state in (LeaseState.GRANTED, LeaseState.HELD) and lease_id not in self._too_late

    def _is_of_this_life(self, lease: Lease) -> bool:
        return lease.generation == self.member.stamp.generation

    def _due_s(self, lease_id: LeaseId) -> float:
        known = self.member.known.get(lease_id)
        if known is None or known.lease.state is not LeaseState.RECALLED or lease_id in self._too_late:
            return float("-inf")
        return known.due_s
