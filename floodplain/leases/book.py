"""The coordinator's rules: which member lends how many bytes to which consumer. Sans-IO.

Times are arguments, in seconds of a monotonic clock. A new book considers every member alive, so after a restart
nothing expires for one whole TTL. After every call: the bytes leased on a device, owed bytes included, are at most what
its owner offers. A recalled or owed byte is leased again only after it was offered anew; before that, its owner has
seen it free, or the owner has ended and the consumer has freed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from floodplain.leases import rules
from floodplain.leases.choice import AllowedPairs, choose_disallowed
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply
from floodplain.leases.rules import DEFAULT_LIMITS, EndedLenders, LeaseLimits
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome, Stamp, judge
from floodplain.leases.table import Changes, LeaseTable


class Speaker(Protocol):
    """What the sender of messages may do, by its token."""

    def may_lend(self, name: str, /) -> bool:
        """Whether the sender may offer bytes of that member's device."""

    def is_producer(self, name: str, /) -> bool:
        """Whether the sender's token is a producer's for that member."""


class LeaseBook:
    """Handles members' messages: who is alive, what is offered, leased, recalled, and settled.

    A member that is silent for ``ttl_s`` seconds is considered dead. ``members``, ``leases`` and ``floor`` (of
    ``LeaseTable``) are a store's.

    ``may_borrow_from``: who may borrow from whom; None if all may borrow from all.
    """

    def __init__(
        self,
        ttl_s: float,
        now: float,
        members: Iterable[Member] = (),
        leases: Iterable[Lease] = (),
        limits: LeaseLimits = DEFAULT_LIMITS,
        floor: int = 0,
    ) -> None:
        self.may_borrow_from: AllowedPairs | None = None
        self.limits = limits
        self.rows = LeaseTable(floor)
        self.rows.load(members, leases)
        self.roster = Roster(self.rows, ttl_s, now, limits)
        self._ended_lenders = EndedLenders(self.rows, ttl_s)
        self._due_s: dict[LeaseId, float] = {}
        self._time_recalls(self.rows.leases, now)

    def handle(self, message: Message, now: float) -> Reply:
        """Return the reply to one message."""
        return self.handle_all([message], now)[0]

    def handle_all(self, messages: Sequence[Message], now: float, speaker: Speaker | None = None) -> list[Reply]:
        """Apply messages in their order at ``now``; return a reply for each.

        Nothing that a member offers is granted before this book has received a message from the member: its first batch
        contains what it withdrew while no coordinator answered.

        The reply to a join or heartbeat lists the member's leases as they are after all of the messages. Replies to one
        member share one tuple of leases, and so do copies of a request. ``speaker`` None: tokens are not checked.
        """
        granted: dict[tuple[str, int, int], Reply] = {}
        changing = {message.name for message in messages if isinstance(message, Offer | Recall)}
        replies = []
        for message in messages:
            replies.append(self._handle_one(message, now, speaker, granted))
            if _confirms_offer(message, replies[-1], changing):
                self.roster.heard.add(message.name)
        pairs = list(zip(messages, replies, strict=True))
        greeted = {message.name for message, reply in pairs if _is_greeted(message, reply)}
        told = {name: self.roster.leases_of(name) for name in greeted}
        replies = [replace(reply, leases=told[m.name]) if _is_greeted(m, reply) else reply for m, reply in pairs]
        lists = {id(reply.leases): reply.leases for reply in replies}
        self._time_recalls({lease.lease_id for leases in lists.values() for lease in leases}, now)
        due_in_s = {key: self._due_of(leases, now) for key, leases in lists.items()}
        return [replace(reply, due_in_s=due_in_s[id(reply.leases)]) for reply in replies]

    def count_told(self, messages: Iterable[Message]) -> int:
        """Return about how many leases an answer to these messages lists, without those that it grants."""
        greeted = {message.name for message in messages if isinstance(message, Join | Heartbeat)}
        asked = {(each.name, each.generation, each.number) for each in messages if isinstance(each, Request)}
        return sum(len(self.roster.leases_of(name)) for name in greeted) + sum(
            len(self.rows.of_request(*request)) for request in asked
        )

    def tick(self, now: float) -> list[str]:
        """End members that were silent for a TTL, return their names, and forget members that ended long ago.

        If a device's lender has ended, leases that their consumers freed are settled one TTL after both.
        """
        dead = self.roster.end_silent(now)
        self._ended_lenders.settle(now)
        self.roster.forget_ended(now)
        self._due_s = {lease_id: due_s for lease_id, due_s in self._due_s.items() if self._is_recalled(lease_id)}
        return dead

    def forget(self, name: str) -> Reply:
        """End a member for good, because an operator says that its device and the bytes on it are lost."""
        if name not in self.rows.members:
            return Reply(Outcome.CONFLICT, detail=f"{name} is no member")
        self.roster.end(name)
        return rules.lose(self.rows, name)

    def allow(self, pairs: AllowedPairs | None, now: float, deadline_s: float) -> list[Lease]:
        """Grant along these pairs from now on; recall other leases, and return them. Offers stay as they are."""
        self.may_borrow_from = pairs
        disallowed = choose_disallowed(self.rows.leases.values(), pairs)
        recalled = [rules.recall_lease(self.rows, lease, deadline_s) for lease in disallowed]
        self._time_recalls([lease.lease_id for lease in recalled], now)
        return recalled

    def due_in_s(self, now: float) -> dict[LeaseId, float]:
        """Return the seconds that remain for each recalled lease's consumer; below zero if overdue."""
        return {lease_id: due_s - now for lease_id, due_s in self._due_s.items() if self._is_recalled(lease_id)}

    def overdue(self, now: float) -> list[Lease]:
        """Return recalled leases past their deadline that are neither released nor expired."""
        return [self.rows.leases[lease_id] for lease_id, left_s in self.due_in_s(now).items() if left_s < 0]

    def take_changes(self) -> Changes:
        """As ``LeaseTable.take_changes``: to be written before any reply is sent."""
        return self.rows.take_changes()

    def _handle_one(
        self, message: Message, now: float, speaker: Speaker | None, granted: dict[tuple[str, int, int], Reply]
    ) -> Reply:
        name, known = message.name, self.rows.members.get(message.name)
        if known is not None and known.is_lender and speaker is not None and not speaker.may_lend(name):
            return Reply(Outcome.CONFLICT, detail=f"{name} lends, and its life is not a consumer's to speak for")
        if not isinstance(message, Request):
            return self._dispatch(message, now, speaker)
        key = name, message.generation, message.number
        reply = granted[key] if key in granted else self._dispatch(message, now, speaker)
        if reply.outcome is Outcome.APPLIED:
            granted[key] = reply
        return reply

    def _dispatch(self, message: Message, now: float, speaker: Speaker | None) -> Reply:
        match message:
            case Join():
                is_lender = speaker is not None and speaker.is_producer(message.name)
                return self.roster.join(message, now, is_lender=is_lender)
            case Heartbeat():
                return self.roster.heartbeat(message, now)
            case Leave():
                return self.roster.leave(message)
            case Offer():
                return self.roster.refusal(message.name, message.stamp) or rules.offer(self.rows, message)
            case Recall():
                return self.roster.refusal(message.name, message.stamp) or rules.recall(self.rows, message)
            case Observe():
                return self.roster.refusal(message.name, message.stamp) or rules.observe(self.rows, message)
            case Request():
                return self.roster.absence(message) or rules.request(
                    self.rows, message, self._free_for(message), self.limits
                )
            case Report():
                return rules.report(self.rows, message)

    def _free_for(self, request: Request) -> dict[str, int]:
        """Return unleased bytes of each heard producer from which this consumer may borrow, best first."""
        consumer, most = request.name, self.limits.max_leases_on_device - len(request.shards)
        allowed = self.rows.lenders if self.may_borrow_from is None else self.may_borrow_from.get(consumer, ())
        names = (name for name in allowed if name != consumer and name in self.roster.heard)
        return {name: self.rows.unleased_bytes(name) for name in names if self.rows.count_on_device(name) <= most}

    def _due_of(self, leases: Sequence[Lease], now: float) -> dict[LeaseId, float]:
        recalled = (lease.lease_id for lease in leases if lease.state is LeaseState.RECALLED)
        return {i: max(0.0, self._due_s[i] - now) for i in recalled if i in self._due_s}

    def _is_recalled(self, lease_id: LeaseId) -> bool:
        lease = self.rows.leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.RECALLED

    def _time_recalls(self, lease_ids: Iterable[LeaseId], now: float) -> None:
        """Start the deadlines of recalled leases that are new here; after a restart all deadlines start anew."""
        for lease_id in lease_ids:
            lease = self.rows.leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.RECALLED:
                self._due_s.setdefault(lease_id, now + (lease.deadline_s or 0.0))
            else:
                self._due_s.pop(lease_id, None)


def _confirms_offer(message: Message, reply: Reply, changing: Collection[str]) -> bool:
    """Whether the reply confirms that the sender still offers what is in its row.

    If a recall sent with a heartbeat is stale, the sender's offer is unknown: ``changing`` names members whose offers
    change in the batch.
    """
    says_so = isinstance(message, Offer | Recall) or (
        isinstance(message, Join | Heartbeat) and message.name not in changing
    )
    return says_so and reply.outcome is Outcome.APPLIED


def _is_greeted(message: Message, reply: Reply) -> bool:
    return isinstance(message, Join | Heartbeat) and reply.outcome is Outcome.APPLIED


class Roster:
    """Tracks which members are alive. A new roster considers alive every member whose row has an instance.

    ``now`` is the clock; later, if living members were promised a longer life than ``ttl_s``.

    ``heard``: living members whose offers were received since ``now``: those bytes may be granted.
    """

    def __init__(self, table: LeaseTable, ttl_s: float, now: float, limits: LeaseLimits = DEFAULT_LIMITS) -> None:
        self.table = table
        self.ttl_s = ttl_s
        self.limits = limits
        self.heard: set[str] = set()
        self._ended_s: dict[str, float] = {}
        self._seen_s = {name: now for name, member in table.members.items() if member.instance}

    @property
    def living(self) -> Collection[str]:
        """Return names of members that are considered alive."""
        return self._seen_s.keys()

    def leases_of(self, name: str) -> tuple[Lease, ...]:
        """Return all leases that a member lends or borrows."""
        return (*self.table.on_device(name), *self.table.of_consumer(name))

    def join(self, message: Join, now: float, *, is_lender: bool = False) -> Reply:
        """Start a member's life; joining twice with one instance is joining once. ``is_lender``: by a producer's token.

        While an older process of that name may live, a new one is DEFERRED: the old one may be about to allocate what
        it was granted.
        """
        name, known = message.name, self.table.members.get(message.name)
        if known is None:
            if not self._make_room(self.limits.max_members if is_lender else self.limits.max_consumers):
                return Reply(Outcome.DEFERRED, detail="there are as many members as there may be: try later")
            self.table.add_member(name, message.instance, is_lender=is_lender)
        elif known.instance != message.instance:
            if name in self._seen_s:
                detail = f"another process was {name} until now: wait, or take another name"
                return Reply(Outcome.DEFERRED, known, detail=detail)
            anew = replace(known, instance=message.instance, generation=known.generation + 1, last_request=0)
            self.table.revise(replace(anew, is_gone=False, is_lender=is_lender))
        return self._greet(name, now)

    def heartbeat(self, message: Heartbeat, now: float) -> Reply:
        """Renew a member's life. STALE if it was considered dead: it joins anew, and has lost what it borrowed."""
        return self.absence(message) or self._greet(message.name, now)

    def absence(self, message: Heartbeat | Request) -> Reply | None:
        """Return the reply if the sender has not joined, or was considered dead; None if it is alive."""
        known = self.table.members.get(message.name)
        if known is None or message.generation > known.generation:
            return Reply(Outcome.DEFERRED, known, detail=f"{message.name} has not joined")
        if not self.is_life(known, message.generation):
            return Reply(Outcome.STALE, known, detail=f"{message.name} was taken for dead: join anew")
        return None

    def leave(self, message: Leave) -> Reply:
        """End a member that leaves in an orderly way."""
        known = self.table.members.get(message.name)
        if known is None or not self.is_life(known, message.generation):
            return Reply(Outcome.STALE, known)
        self.end(message.name, is_last=message.is_last)
        return Reply(Outcome.APPLIED, self.table.members[message.name])

    def end_silent(self, now: float) -> list[str]:
        """End members that were silent for a TTL; return their names."""
        dead = [name for name, seen_s in self._seen_s.items() if now - seen_s > self.ttl_s]
        for name in dead:
            self.end(name)
        return dead

    def forget_ended(self, now: float) -> None:
        """Forget members that ended long ago and have no leases left."""
        for name in self.table.members.keys() - self._seen_s.keys() - self._ended_s.keys():
            self._ended_s[name] = now
        for name, ended_s in list(self._ended_s.items()):
            if now - ended_s >= self.limits.forget_after_s and self.table.owes_nothing(name):
                self._forget(name)

    def end(self, name: str, *, is_last: bool = False) -> None:
        """End a life: what the member borrowed is owed, and its unleased offer is withdrawn.

        If it was the last life of its name, owed bytes of its device are settled without an observation. The revisions
        of its producers rise, so that no earlier observation settles: it may have allocated since.
        """
        self._seen_s.pop(name, None)
        self.heard.discard(name)
        for lease in self.table.of_consumer(name):
            if lease.allows(LeaseEvent.EXPIRE):
                self.table.owe(lease.after(LeaseEvent.EXPIRE))
                self.table.revise(self.table.members[lease.producer])
        if is_last:
            self._bury(name)
        member, leased = self.table.members[name], self.table.leased_bytes(name)
        hidden = min(member.hidden_bytes, leased)
        self.table.revise(replace(member, instance="", offered_bytes=leased, hidden_bytes=hidden))

    def is_life(self, member: Member, generation: int) -> bool:
        """Whether ``generation`` is the member's newest incarnation, and alive."""
        return generation == member.generation and member.name in self._seen_s

    def refusal(self, name: str, stamp: Stamp) -> Reply | None:
        """Return the reply if a message about a member's own row is to change nothing; None if it may."""
        known = self.table.members.get(name)
        if known is None:
            return Reply(Outcome.DEFERRED, detail=f"{name} has not joined")
        outcome = judge(stamp, known.stamp)
        if outcome is Outcome.APPLIED and not self.is_life(known, stamp.generation):
            outcome = Outcome.STALE
        return None if outcome is Outcome.APPLIED else Reply(outcome, known)

    def _bury(self, name: str) -> None:
        self.table.put_member(replace(self.table.members[name], is_gone=True))
        for lease in self.table.on_device(name):
            if lease.is_owed:
                self.table.owe(lease)

    def _make_room(self, most: int) -> bool:
        """Whether one more member fits among ``most``; may forget the first one to end that owes nothing."""
        if len(self.table.members) < most:
            return True
        first = next((name for name in self._ended_s if self.table.owes_nothing(name)), None)
        if first is not None:
            self._forget(first)
        return first is not None

    def _forget(self, name: str) -> None:
        del self._ended_s[name]
        self.table.forget_member(name)

    def _greet(self, name: str, now: float) -> Reply:
        """Mark a member as alive. The reply omits its leases: the book adds them once for a batch of messages."""
        self._ended_s.pop(name, None)
        self._seen_s[name] = max(now, self._seen_s.get(name, now))  # a later time from the start stays
        return Reply(Outcome.APPLIED, self.table.members[name])
