"""The coordinator's rules: which member lends how many bytes to which consumer. Sans-IO.

Times are arguments, in seconds of a monotonic clock. A new book considers every member alive, so after a restart
nothing expires for one whole TTL.

After every call: the bytes leased on a device, owed bytes included, are at most what its owner offers. A recalled or
owed byte is leased again only after it was offered anew; before that, its owner has seen it free, or the owner has
ended and the consumer has freed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from floodplain.leases import rules
from floodplain.leases.choice import AllowedPairs, choose_disallowed
from floodplain.leases.limits import DEFAULT_LIMITS, LeaseLimits
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.roster import Roster
from floodplain.leases.rows import Member, Reply
from floodplain.leases.rules import EndedLenders
from floodplain.leases.states import Lease, LeaseId, LeaseState, Outcome
from floodplain.leases.table import Changes, LeaseTable


class Speaker(Protocol):
    """What the sender of messages may do, as its token says."""

    def may_lend(self, name: str, /) -> bool:
        """Whether the sender may offer bytes of that member's device."""

    def is_producer(self, name: str, /) -> bool:
        """Whether the sender's token is a producer's for that member."""


class LeaseBook:
    """Handles members' messages: who is alive, what is offered, leased, recalled, and settled.

    Args:
        ttl_s: Seconds of silence after which a member is considered dead.
        now: The clock.
        members: Rows of a store.
        leases: Rows of a store that have not ended.
        limits: The most members and leases.
        floor: For generations and revisions of new members (``LeaseTable``).

    Attributes:
        may_borrow_from: Who may borrow from whom; None if all may borrow from all.
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

        Nothing that a member offers is granted before this book has received a message from the member: the member's
        first batch contains what it withdrew while no coordinator answered.

        The reply to a join or heartbeat lists the member's leases as they are after all of the messages. Replies to one
        member share one tuple of leases, and so do copies of a request: an answer is no longer than what its members
        have.

        ``speaker`` is what the sender may do; None if tokens are not checked.
        """
        granted: dict[tuple[str, int, int], Reply] = {}
        changing = {message.name for message in messages if isinstance(message, Offer | Recall)}
        replies = []
        for message in messages:
            replies.append(self._handle_one(message, now, speaker, granted))
            if _confirms_offer(message, replies[-1], changing):
                self.roster.heard.add(message.name)
        greeted = {m.name for m, r in zip(messages, replies, strict=True) if _is_greeted(m, r)}
        told = {name: self.roster.leases_of(name) for name in greeted}
        self._time_recalls({lease.lease_id for reply in replies for lease in reply.leases}, now)
        self._time_recalls({lease.lease_id for leases in told.values() for lease in leases}, now)
        due_in_s = {name: self._due_of(leases, now) for name, leases in told.items()}
        return [
            replace(reply, leases=told[message.name], due_in_s=due_in_s[message.name])
            if _is_greeted(message, reply)
            else replace(reply, due_in_s=self._due_of(reply.leases, now))
            for message, reply in zip(messages, replies, strict=True)
        ]

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
        """Grant only along these pairs from now on; recall the leases that they do not allow, and return them.

        The offers stay: the producer learns of the recall, and takes the bytes back once they are free.
        """
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
        """Return rows changed since the last call, to be written before any reply is sent."""
        return self.rows.take_changes()

    def _handle_one(
        self, message: Message, now: float, speaker: Speaker | None, granted: dict[tuple[str, int, int], Reply]
    ) -> Reply:
        known = self.rows.members.get(message.name)
        if known is not None and known.is_lender and speaker is not None and not speaker.may_lend(message.name):
            return Reply(
                Outcome.CONFLICT, detail=f"{message.name} lends, and its life is not a consumer's to speak for"
            )
        if not isinstance(message, Request):
            return self._dispatch(message, now, speaker)
        key = message.name, message.generation, message.number
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
                return self._request(message)
            case Report():
                return rules.report(self.rows, message)

    def _request(self, message: Request) -> Reply:
        known = self.rows.members.get(message.name)
        if known is None or message.generation > known.generation:
            return Reply(Outcome.DEFERRED, known, detail=f"{message.name} has not joined")
        if not self.roster.is_life(known, message.generation):
            return Reply(Outcome.STALE, known, detail=f"{message.name} was taken for dead: join anew")
        return rules.request(self.rows, message, self._free_for(message), self.limits)

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
    """Whether the reply confirms that the sender still offers what its row says.

    A member that wants bytes back sends heartbeat and recall together. If the recall is stale, its offer is unknown; so
    ``changing`` names the members whose offers change in the batch.
    """
    says_so = isinstance(message, Offer | Recall) or (
        isinstance(message, Join | Heartbeat) and message.name not in changing
    )
    return says_so and reply.outcome is Outcome.APPLIED


def _is_greeted(message: Message, reply: Reply) -> bool:
    return isinstance(message, Join | Heartbeat) and reply.outcome is Outcome.APPLIED
