"""Which members are alive: they join, send heartbeats, and end; their offers and leases change accordingly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from floodplain.leases.limits import DEFAULT_LIMITS, LeaseLimits
from floodplain.leases.messages import Heartbeat, Join, Leave
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseEvent, Outcome, Stamp, judge
from floodplain.leases.table import LeaseTable


class Roster:
    """Tracks which members are alive. A new roster considers alive every member whose row has an instance.

    Args:
        table: The rows that it changes.
        ttl_s: Seconds of silence after which a member is considered dead.
        now: The clock; later, if living members were promised a longer life than the TTL.
        limits: How many members are kept, and for how long.

    Attributes:
        heard: Living members that have said since ``now`` what they offer: those bytes may be granted.
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
        """Start a member's life; joining twice with one instance is joining once.

        While an older process of that name may live, a new one is DEFERRED: the old one may be about to allocate what
        it was granted. ``is_lender`` says whether the sender's token is a producer's.
        """
        known = self.table.members.get(message.name)
        if known is None:
            if not self._make_room(self.limits.max_members if is_lender else self.limits.max_consumers):
                return Reply(Outcome.DEFERRED, detail="there are as many members as there may be: try later")
            self.table.add_member(message.name, message.instance, is_lender=is_lender)
        elif known.instance != message.instance and message.name in self._seen_s:
            return Reply(
                Outcome.DEFERRED,
                known,
                detail=f"another process was {message.name} until now: wait, or take another name",
            )
        elif known.instance != message.instance:
            self.table.revise(
                replace(
                    known,
                    instance=message.instance,
                    generation=known.generation + 1,
                    last_request=0,
                    is_gone=False,
                    is_lender=is_lender,
                )
            )
        return self._greet(message.name, now)

    def heartbeat(self, message: Heartbeat, now: float) -> Reply:
        """Renew a member's life. STALE if it was considered dead: it joins anew, and has lost what it borrowed."""
        known = self.table.members.get(message.name)
        if known is None or message.generation > known.generation:
            return Reply(Outcome.DEFERRED, known, detail=f"{message.name} has not joined")
        if not self.is_life(known, message.generation):
            return Reply(Outcome.STALE, known, detail=f"{message.name} was taken for dead: join anew")
        return self._greet(message.name, now)

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

    def forget_ended(self, now: float) -> list[str]:
        """Forget members that ended long ago and have no leases left; return their names."""
        for name in self.table.members.keys() - self._seen_s.keys() - self._ended_s.keys():
            self._ended_s[name] = now
        long_ago = [name for name, ended_s in self._ended_s.items() if now - ended_s >= self.limits.forget_after_s]
        forgotten = [name for name in long_ago if self.table.owes_nothing(name)]
        for name in forgotten:
            self._forget(name)
        return forgotten

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
