"""A coordinator in virtual time without heartbeats that change nothing: 90 million of 1,000 GPUs in a day."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from floodplain.leases.choice import AllowedPairs
from floodplain.leases.messages import Heartbeat, Message
from floodplain.leases.rows import Reply
from floodplain.leases.table import Changes
from floodplain.lending.agent import BEAT_S
from floodplain.sim.coordinator import LeaseTotals, VirtualAgent, VirtualCoordinator
from floodplain.sim.environment import Environment


class QuietCoordinator(VirtualCoordinator):
    """Grants the leases of a ``VirtualCoordinator``, and gets only the messages that can change something.

    Members count as alive until they die. Then ticks of the book run until it has noticed, and before each of them
    every living member sends a heartbeat. A request that waits is sent again when a lender offers more.

    Args:
        sample_s: Seconds between two samples of lent bytes.

    Attributes:
        per_second: Messages other than heartbeats, by the second in which they were answered.
    """

    def __init__(
        self, environment: Environment, ttl_s: float, may_borrow_from: AllowedPairs, sample_s: float = 1.0
    ) -> None:
        self.per_second: Counter[int] = Counter()
        self._is_ticking = False
        self._waiting: set[str] = set()
        self._borrowers: defaultdict[str, list[str]] = defaultdict(list)
        for consumer, producers in may_borrow_from.items():
            for producer in producers:
                self._borrowers[producer].append(consumer)
        super().__init__(environment, ttl_s, may_borrow_from)
        self.totals = LeaseTotals(sample_s)

    def answer(self, messages: Sequence[Message]) -> list[Reply] | None:
        """As the base class."""
        replies = super().answer(messages)
        if replies is not None:
            kinds = (type(message).__name__.lower() for message in messages)
            self.per_second[int(self.environment.now)] += sum(kind not in ("heartbeat", "join") for kind in kinds)
        return replies

    def start(self) -> None:
        """As the base class; ticks run if a member has died meanwhile."""
        super().start()
        self._arrange_tick()

    def lose(self, name: str) -> None:
        """Receive no more messages of a member; its last heartbeat was received just now."""
        if self.is_up:
            self.book.handle_all(self._heartbeats([name]), self.environment.now)
        super().lose(name)
        self._waiting.discard(name)
        self._arrange_tick()

    def arrange_beat(self, agent: VirtualAgent) -> None:
        """Have an agent that has not joined try again; others begin an exchange when they have a message."""
        if agent.membership.pending():
            self._waiting.add(agent.membership.name)
        else:
            self._waiting.discard(agent.membership.name)
        if not agent.membership.has_joined:
            super().arrange_beat(agent)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _arrange_tick(self) -> None:
        """Tick, four times in a TTL, while the book has not noticed a death."""
        if not self._is_ticking and self._has_unnoticed():
            self._is_ticking = True
            self.environment.schedule(self.environment.now + self.ttl_s / 4, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        if self.is_up and not self.is_over:
            self.book.handle_all(self._heartbeats(self.agents), self.environment.now)
            super()._tick()

    def _heartbeats(self, names: Iterable[str]) -> list[Message]:
        rows = ((name, self._members.get(name)) for name in names)
        return [
            Heartbeat(name, row.generation)
            for name, row in rows
            if row is not None and row.instance == self.agents[name].instance
        ]

    def _has_unnoticed(self) -> bool:
        """Whether a member is dead that the book considers alive, or leases of a dead lender wait to be settled."""
        rows = self.book.rows
        return any(
            name not in self.agents or self.agents[name].instance != rows.members[name].instance
            for name in self.book.roster.living
        ) or any(not rows.members[lease.producer].instance for lease in rows.freed.values())

    def _commit(self) -> Changes:
        """As the base class. Members whose requests wait for a lender that offers more send them within a beat."""
        changes = super()._commit()
        for member in changes.members:
            if member.name in self.book.rows.lenders and self.book.rows.unleased_bytes(member.name) > 0:
                for name in self._borrowers[member.name]:
                    if name in self._waiting:
                        self.agents[name].arrange(self.environment.now + BEAT_S)
        return changes
