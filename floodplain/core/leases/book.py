"""Who lends what to whom: the rules of one coordinator over its members and leases. Sans-IO.

Time is an argument, in seconds of a monotonic clock. It serves for silence and deadlines only: no rule about bytes
depends on it. A new book takes everybody for alive, so after a restart there is one whole TTL before anything expires.

What holds after every call: what is leased on a device, owed bytes included, is at most what its owner has put up; and
a byte that was recalled or is owed is not leased again before its owner has seen it free and has put it up again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from floodplain.core.leases import borrowing, lending
from floodplain.core.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.core.leases.roster import Roster
from floodplain.core.leases.rows import Member, Reply
from floodplain.core.leases.states import Lease, LeaseId, LeaseState, Outcome
from floodplain.core.leases.table import Changes, LeaseTable


class LeaseBook:
    """See the module.

    Args:
        ttl_s: Seconds of silence after which a member is taken for dead.
        now: The clock.
        members: Rows of a store.
        leases: Rows of a store that have not ended.
        may_borrow_from: For each consumer the producers that it may borrow from, best first; None if all may borrow
            from all.
    """

    def __init__(
        self,
        ttl_s: float,
        now: float,
        members: Iterable[Member] = (),
        leases: Iterable[Lease] = (),
        may_borrow_from: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.may_borrow_from = may_borrow_from
        self.rows = LeaseTable()
        self.rows.load(members, leases)
        self.roster = Roster(self.rows, ttl_s, now)
        self._due_s: dict[LeaseId, float] = {}
        self._time_recalls(self.rows.leases.values(), now)

    def handle(self, message: Message, now: float) -> Reply:
        """What becomes of a message, at ``now``."""
        reply = self._dispatch(message, now)
        self._time_recalls(reply.leases, now)
        due_in_s = {
            lease.lease_id: max(0.0, self._due_s[lease.lease_id] - now)
            for lease in reply.leases
            if lease.state is LeaseState.RECALLED
        }
        return replace(reply, due_in_s=due_in_s)

    def tick(self, now: float) -> list[str]:
        """Take for dead who was silent for a TTL; return their names."""
        dead = self.roster.end_silent(now)
        self._due_s = {lease_id: due_s for lease_id, due_s in self._due_s.items() if self._is_recalled(lease_id)}
        return dead

    def forget(self, name: str) -> Reply:
        """An operator says that a device will not come back: what was on it is lost, its member is no more.

        What nobody has allocated yet is recalled, and owed once its consumer has heard of that. If no other device of
        that name comes and sees it free, saying so again loses it, too.
        """
        if name not in self.rows.members:
            return Reply(Outcome.CONFLICT, detail=f"{name} is no member")
        self.roster.end(name)
        return lending.lose(self.rows, name)

    def due_in_s(self, now: float) -> dict[LeaseId, float]:
        """Seconds that the consumer of each recalled lease has left; below zero if it is overdue."""
        return {lease_id: due_s - now for lease_id, due_s in self._due_s.items() if self._is_recalled(lease_id)}

    def overdue(self, now: float) -> list[Lease]:
        """Recalled leases whose deadline has passed, and whose consumer has neither released them nor died."""
        return [self.rows.leases[lease_id] for lease_id, left_s in self.due_in_s(now).items() if left_s < 0]

    def take_changes(self) -> Changes:
        """Rows that have changed since this was last asked: what a store must write before anybody is told."""
        return self.rows.take_changes()

    def _dispatch(self, message: Message, now: float) -> Reply:
        match message:
            case Join():
                return self.roster.join(message, now)
            case Heartbeat():
                return self.roster.heartbeat(message, now)
            case Leave():
                return self.roster.leave(message)
            case Offer():
                return self.roster.refusal(message.name, message.stamp) or lending.offer(self.rows, message)
            case Recall():
                return self.roster.refusal(message.name, message.stamp) or lending.recall(self.rows, message)
            case Observe():
                return self.roster.refusal(message.name, message.stamp) or lending.observe(self.rows, message)
            case Request():
                return self._request(message)
            case Report():
                return borrowing.report(self.rows, message)

    def _request(self, message: Request) -> Reply:
        known = self.rows.members.get(message.name)
        if known is None or message.generation > known.generation:
            return Reply(Outcome.DEFERRED, known, detail=f"{message.name} has not joined")
        if not self.roster.is_life(known, message.generation):
            return Reply(Outcome.STALE, known, detail=f"{message.name} was taken for dead: join anew")
        return borrowing.request(self.rows, message, self._free_for(message.name))

    def _free_for(self, consumer: str) -> dict[str, int]:
        """What each producer that lives has put up and not leased, for this consumer, best first."""
        allowed = self.roster.living if self.may_borrow_from is None else self.may_borrow_from.get(consumer, ())
        names = (name for name in allowed if name != consumer and name in self.roster.living)
        return {name: self.rows.unleased_bytes(name) for name in names}

    def _is_recalled(self, lease_id: LeaseId) -> bool:
        lease = self.rows.leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.RECALLED

    def _time_recalls(self, leases: Iterable[Lease], now: float) -> None:
        """Deadlines begin when the recall is known here; after a restart they begin anew."""
        for lease in leases:
            if lease.state is LeaseState.RECALLED:
                self._due_s.setdefault(lease.lease_id, now + (lease.deadline_s or 0.0))
            else:
                self._due_s.pop(lease.lease_id, None)
