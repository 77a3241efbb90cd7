"""The coordinator in virtual time: the product's lease book, the rows of its store, and the agents of its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from floodplain.leases.book import LeaseBook
from floodplain.leases.choice import AllowedPairs
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseId, LeaseState, concerned
from floodplain.leases.table import Changes
from floodplain.lending.agent import BEAT_S, MIN_GAP_S, pause_s
from floodplain.lending.membership import LentDevice, Membership
from floodplain.sim.environment import Environment

EXCHANGE_S = 0.005
"""Seconds from a member's messages to their answer: a transaction (3 ms) and the network."""
TICK_S = 0.5
"""Seconds between two ticks of the book, as often as a leader writes its beat."""


@dataclass(slots=True)
class LeaseTotals:
    """What became of leases, from the rows that the store gets.

    ``granted_bytes`` are at all times the sum of the bytes that are live and those that have ended: ``recalled`` by
    their lenders, ``returned`` by their borrowers, or ``lost`` with a borrower that died, or with their device.

    Attributes:
        num_leases: By the same outcomes, and ``granted``.
        num_bytes: By the same outcomes.
        live: Bytes of the leases that have not ended.
        samples: (time, live bytes) after changes, ``sample_s`` apart or more.
    """

    sample_s: float = 1.0
    num_leases: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    live: dict[LeaseId, int] = field(default_factory=dict)
    samples: list[tuple[float, int]] = field(default_factory=list)
    _lost: set[LeaseId] = field(default_factory=set)
    _live_bytes: int = 0

    def note(self, leases: Iterable[Lease], now: float) -> None:
        """Add the new rows of leases."""
        before = self._live_bytes
        for lease in leases:
            self._note_one(lease)
        if self._live_bytes == before:
            return
        if self.samples and now - self.samples[-1][0] < self.sample_s:
            self.samples[-1] = self.samples[-1][0], self._live_bytes
        else:
            self.samples.append((now, self._live_bytes))

    def _note_one(self, lease: Lease) -> None:
        if lease.lease_id not in self.live:
            self.live[lease.lease_id] = lease.num_bytes
            self._live_bytes += lease.num_bytes
            self._count("granted", lease)
        if lease.state in (LeaseState.EXPIRED, LeaseState.LOST):
            self._lost.add(lease.lease_id)
        if lease.has_ended:
            self._live_bytes -= self.live.pop(lease.lease_id)
            self._count(self._outcome(lease), lease)
            self._lost.discard(lease.lease_id)

    def _outcome(self, lease: Lease) -> str:
        if lease.lease_id in self._lost:
            return "lost"
        return "returned" if lease.deadline_s is None else "recalled"

    def _count(self, outcome: str, lease: Lease) -> None:
        self.num_leases[outcome] += 1
        self.num_bytes[outcome] += lease.num_bytes


class VirtualCoordinator:
    """A lease book that survives in the rows of a store, and the agents that send it messages.

    ``ttl_s``: seconds of silence after which a member is considered dead. ``may_borrow_from``: the lenders of each
    borrower; None if all may borrow from all.

    Attributes:
        agents: Of living members, by name.
        is_over: Set when the simulation shall end: no more beats and ticks.
        num_messages: Messages that were answered, by kind.
    """

    def __init__(self, environment: Environment, ttl_s: float, may_borrow_from: AllowedPairs | None = None) -> None:
        self.environment, self.ttl_s = environment, ttl_s
        self.agents: dict[str, VirtualAgent] = {}
        self.totals = LeaseTotals()
        self.is_up, self.is_over = True, False
        self.num_messages: Counter[str] = Counter()
        self._may_borrow_from = may_borrow_from
        self._members: dict[str, Member] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._floor = 0
        self._unreported: list[str] = []
        self.book = self._open_book()
        self._arrange_tick()

    def answer(self, messages: Sequence[Message]) -> list[Reply] | None:
        """Handle messages and commit their changes; None if no coordinator answers."""
        if not self.is_up:
            return None
        replies = self.book.handle_all(messages, self.environment.now)
        self.num_messages.update(type(message).__name__.lower() for message in messages)
        self._commit()
        return replies

    def stop(self) -> None:
        """Kill the coordinator: nothing is answered, and what is only in memory is gone."""
        self.is_up = False

    def start(self) -> None:
        """Start another coordinator on the same store; all members count as alive for a TTL."""
        self.is_up = True
        self.book = self._open_book()
        for name in self._unreported:
            self.report_lost(name)
        self._unreported.clear()
        agents = list(self.agents.values())
        for place, agent in enumerate(agents):
            agent.arrange(self.environment.now + BEAT_S * place / len(agents))

    def report_lost(self, name: str) -> None:
        """Report, as an operator, that a device and the bytes on it are lost; while it is down, when it is up again."""
        if self.is_up:
            self.book.forget(name)
            self._commit()
        else:
            self._unreported.append(name)

    def lose(self, name: str) -> None:
        """Receive no more messages of a member."""
        del self.agents[name]

    def arrange_beat(self, agent: VirtualAgent) -> None:
        """Have an agent whose exchange has just ended begin the next one in time."""
        agent.arrange(self.environment.now + pause_s(agent.membership, self.ttl_s))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_book(self) -> LeaseBook:
        members, leases = self._members.values(), self._leases.values()
        book = LeaseBook(self.ttl_s, self.environment.now, members, leases, floor=self._floor)
        book.may_borrow_from = self._may_borrow_from
        return book

    def _arrange_tick(self) -> None:
        self.environment.schedule(self.environment.now + TICK_S, self._tick)

    def _tick(self) -> None:
        if self.is_up and not self.is_over:
            self.book.tick(self.environment.now)
            self._commit()
        if not self.is_over:
            self._arrange_tick()

    def _commit(self) -> Changes:
        changes = self.book.take_changes()
        self._store(changes)
        self.totals.note(changes.leases, self.environment.now)
        for name in sorted(concerned(changes.leases)):
            if name in self.agents:
                self.agents[name].wake()
        return changes

    def _store(self, changes: Changes) -> None:
        self._floor = changes.floor
        self._members |= {member.name: member for member in changes.members}
        for name in changes.forgotten:
            self._members.pop(name, None)
        for lease in changes.leases:
            if lease.has_ended:
                self._leases.pop(lease.lease_id, None)
            else:
                self._leases[lease.lease_id] = lease


class VirtualAgent:
    """Sends a member's messages and applies the answers, at the times of ``lending.agent.LeaseAgent``.

    ``instance``: the member's process: another life of its name has another one. ``can_offer``: whether the last
    exchange was answered.
    """

    def __init__(
        self, coordinator: VirtualCoordinator, name: str, instance: str, device: LentDevice | None = None
    ) -> None:
        self.membership = Membership(name, instance, device, lambda: coordinator.environment.now)
        self.instance = instance
        self.can_offer = False
        self._coordinator, self._environment = coordinator, coordinator.environment
        self.is_dead = False
        self._due_s, self._last_s = float("inf"), float("-inf")
        self.membership.on_change = self.wake
        coordinator.agents[name] = self
        self.wake()

    def wake(self) -> None:
        """Exchange soon, because there are messages to send or news to receive."""
        self.arrange(self._last_s + MIN_GAP_S)

    def arrange(self, when_s: float) -> None:
        """Exchange at a time, or as soon as it has come, unless an exchange is due before."""
        when_s = max(when_s, self._environment.now)
        if when_s < self._due_s:
            self._due_s = when_s
            self._environment.schedule(when_s, partial(self._exchange, when_s))

    def die(self) -> None:
        """End the process: no farewell, and no answer is read."""
        self.is_dead = True
        self._coordinator.lose(self.membership.name)

    def _exchange(self, due_s: float) -> None:
        if self.is_dead or due_s != self._due_s or self._coordinator.is_over:
            return
        self._due_s, self._last_s = float("inf"), self._environment.now
        messages, sent_s = self.membership.collect()
        self._environment.schedule(self._last_s + EXCHANGE_S, partial(self._settle, messages, sent_s))

    def _settle(self, messages: list[Message], sent_s: float) -> None:
        if self.is_dead:
            return
        replies = self._coordinator.answer(messages)
        self.can_offer = replies is not None
        if replies is not None and self.membership.learn(messages, replies, self._coordinator.ttl_s, sent_s):
            self.wake()
        self._coordinator.arrange_beat(self)
