"""A world for the lease protocol, by seed: devices whose bytes are really taken, processes that die, a network.

Messages are late, lost and doubled; processes are stopped, killed and replaced; the coordinator dies, also between a
change and its commit, and starts again from its store. Everybody acts on what it was told. What is physically allocated
is kept beside it, and the laws are about that: an allocation or a growth for which there is no room fails the run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from floodplain.core.leases.book import LeaseBook
from floodplain.core.leases.borrower import Borrower
from floodplain.core.leases.lender import Lender
from floodplain.core.leases.member import MemberSide
from floodplain.core.leases.messages import Leave, Message, Observe
from floodplain.core.leases.rows import Member, Reply, Shard
from floodplain.core.leases.states import TRANSITIONS, Lease, LeaseId

TTL_S = 10.0
BEAT_S = 1.0
DEADLINE_S = 4.0
CAPACITY = 16


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what goes wrong.

    Attributes:
        lost: Part of all messages, either way.
        doubled: Part of all messages, either way.
        max_delay_s: Of a message, either way; so they overtake each other.
        stops_per_s: Of every process, for up to three TTLs; of some consumers another process takes the name meanwhile.
        kills_per_s: Of every process; another of its name is started soon.
        crashes_per_s: Of the coordinator.
    """

    lost: float = 0.0
    doubled: float = 0.0
    max_delay_s: float = 0.1
    stops_per_s: float = 0.0
    kills_per_s: float = 0.0
    crashes_per_s: float = 0.0


@dataclass(eq=False)
class Process:
    """An engine with a device, which lends, or borrows.

    Attributes:
        side: What it knows.
        is_producer: Whether it has a device to lend.
        own_bytes: Of its device, taken by its own pool.
        goal_bytes: Producer: how much it wants to lend; consumer: how much it wants to have borrowed.
        taken: What it has allocated on others' devices.
        leaving: What it says that it has freed, and the driver has not taken back yet.
        stopped_until_s: It does nothing before.
        lives: False after SIGKILL.
    """

    side: MemberSide
    is_producer: bool
    own_bytes: int = 0
    goal_bytes: int = 0
    taken: dict[LeaseId, Lease] = field(default_factory=dict)
    leaving: dict[LeaseId, Lease] = field(default_factory=dict)
    stopped_until_s: float = 0.0
    lives: bool = True

    def __post_init__(self) -> None:
        self.lender = Lender(self.side, CAPACITY, DEADLINE_S)
        self.borrower = Borrower(self.side)


class LeaseWorld:
    """See the module. ``run`` goes on for a while; ``settle`` lets calm return and expects everything back."""

    def __init__(self, seed: int, faults: Faults, num_producers: int = 2, num_consumers: int = 3) -> None:
        self.random, self.faults = Random(seed), faults
        self.now, self._num_events = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.stored_members: dict[str, Member] = {}
        self.stored_leases: dict[LeaseId, Lease] = {}
        self.granted: set[LeaseId] = set()
        self.seen: Counter[str] = Counter()
        self.book: LeaseBook | None = LeaseBook(TTL_S, self.now)
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        for index in range(num_producers + num_consumers):
            is_producer = index < num_producers
            self._start(f"p{index}" if is_producer else f"c{index - num_producers}", is_producer)
        self._at(BEAT_S, self._tick)

    def run(self, seconds: float) -> None:
        """Everything that happens until ``seconds`` from now."""
        end_s = self.now + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            self.check()
        self.now = end_s

    def settle(self) -> None:
        """Nothing goes wrong any more, and nobody wants anything: nothing stays lent."""
        self.faults = Faults()
        self.run(4 * TTL_S)  # the stopped go on, the dead are replaced
        self._wants_change = False
        for zombie in self.zombies:
            self._bury(zombie)
        for process in self.processes.values():
            process.goal_bytes = 0
        self.run(6 * TTL_S)
        assert not self.stored_leases, f"still lent: {self.stored_leases}"
        assert not any(self.foreign_bytes(name) for name in self.processes), "bytes stay taken"
        for name, process in self.processes.items():
            offered = self.stored_members[name].offered_bytes
            assert not offered, f"{name} still puts up {offered} bytes"
            assert not process.is_producer or process.own_bytes == CAPACITY, "a producer did not get its bytes back"

    _wants_change = True

    # -- physics -----------------------------------------------------------------------------------------------------

    def foreign_bytes(self, producer: str) -> int:
        """What others really hold of a device."""
        taken = (
            lease for process in self._all_processes for lease in (*process.taken.values(), *process.leaving.values())
        )
        return sum(lease.num_bytes for lease in taken if lease.producer == producer)

    def check(self) -> None:
        """The laws: leased is at most offered; what others hold, or may allocate now, is leased."""
        if self.book is not None:
            self.book.rows.check_integrity()
        for name, process in self.processes.items():
            leased = sum(lease.num_bytes for lease in self.stored_leases.values() if lease.producer == name)
            held = self.foreign_bytes(name) + self._allocatable_bytes(name)
            assert held <= leased, f"others hold, or may take, {held} bytes of {name}, and {leased} are leased"
            if process.is_producer:
                assert process.own_bytes + self.foreign_bytes(name) <= CAPACITY

    def _allocatable_bytes(self, producer: str) -> int:
        """What consumers believe that they may allocate now."""
        leases = (lease for process in self._all_processes for lease in process.borrower.to_allocate(self.now))
        return sum(lease.num_bytes for lease in leases if lease.producer == producer)

    @property
    def _all_processes(self) -> list[Process]:
        return [process for process in (*self.processes.values(), *self.zombies) if process.lives]

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _at(self, delay_s: float, happen: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_events, happen))

    def _is_hit(self, per_s: float) -> bool:
        """Whether what happens so often happens in this beat."""
        return self.random.random() < per_s * BEAT_S

    def _start(self, name: str, is_producer: bool) -> None:
        instance = f"{name}-{self.random.getrandbits(64):016x}"
        process = Process(MemberSide(name, instance, TTL_S), is_producer)
        self.processes[name] = process
        self._at(self.random.random() * BEAT_S, lambda: self._beat(process))

    def _kill(self, process: Process) -> None:
        self.seen["killed"] += 1
        if self.random.random() < 0.3:
            self._send(process, Leave(process.side.name, process.side.stamp.generation))
        self._bury(process)
        if self.processes[process.side.name] is process:
            delay_s = self.random.random() * 2 * TTL_S
            self._at(delay_s, lambda: self._start(process.side.name, process.is_producer))

    def _bury(self, process: Process) -> None:
        process.lives = False
        process.taken.clear()
        process.leaving.clear()
        process.own_bytes = 0

    def _stop(self, process: Process) -> None:
        self.seen["stopped"] += 1
        process.stopped_until_s = self.now + self.random.random() * 3 * TTL_S
        name = process.side.name
        if not process.is_producer and self.processes[name] is process and self.random.random() < 0.3:
            self.seen["replaced"] += 1
            self.zombies.append(process)
            self._start(name, is_producer=False)

    def _crash(self) -> None:
        self.seen["crashed"] += 1
        self.book = None
        self._at(self.random.random() * TTL_S, self._restart)

    def _restart(self) -> None:
        self.book = LeaseBook(TTL_S, self.now, self.stored_members.values(), self.stored_leases.values())

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, process: Process, message: Message) -> None:
        sent_s = self.now
        self._carry(lambda: self._receive(process, message, sent_s))

    def _carry(self, deliver: Callable[[], object]) -> None:
        for _ in range(2 if self.random.random() < self.faults.doubled else 1):
            if self.random.random() >= self.faults.lost:
                self._at(self.random.random() ** 4 * self.faults.max_delay_s, deliver)  # most are quick

    def _receive(self, process: Process, message: Message, sent_s: float) -> None:
        if self.book is None:
            return
        before = dict(self.book.rows.members)
        reply = self.book.handle(message, self.now)
        self.seen[f"{type(message).__name__} {reply.outcome.value}"] += 1
        if self._is_hit(self.faults.crashes_per_s / 20):
            self.seen["crashed before a commit"] += 1
            self._crash()
            return
        self._commit(message, before)
        self._carry(lambda: self._answer(process, message, reply, sent_s))

    def _answer(self, process: Process, message: Message, reply: Reply, sent_s: float) -> None:
        if process.stopped_until_s > self.now:
            self._at(process.stopped_until_s - self.now, lambda: self._answer(process, message, reply, sent_s))
        elif process.lives:
            process.side.learn(message, reply, sent_s, self.now)

    def _commit(self, message: Message | None, before: dict[str, Member]) -> None:
        assert self.book is not None
        changes = self.book.take_changes()
        for member in changes.members:
            old = before.get(member.name)
            if old is not None and type(message).__name__ != "Offer":
                assert member.offered_bytes <= old.offered_bytes, "only an offer puts bytes up"
            self.stored_members[member.name] = member
        for lease in changes.leases:
            self._note(lease)
            if lease.has_ended:
                self.stored_leases.pop(lease.lease_id)
            else:
                self.stored_leases[lease.lease_id] = lease

    def _note(self, lease: Lease) -> None:
        """Count the change; a lease is granted once, and changes as the table says."""
        old = self.stored_leases.get(lease.lease_id)
        if old is None:
            assert lease.lease_id not in self.granted, "a lease was granted twice"
            self.granted.add(lease.lease_id)
            return
        events = [event for event, state in TRANSITIONS[old.state].items() if state is lease.state]
        assert events and lease.revision == old.revision + 1, f"{old.state} became {lease.state}"
        self.seen[f"{old.state.value} {events[0].value}"] += 1

    def _tick(self) -> None:
        if self.book is not None:
            before = dict(self.book.rows.members)
            self.seen["taken for dead"] += len(self.book.tick(self.now))
            self._commit(None, before)
            self.seen["overdue"] += len(self.book.overdue(self.now))
            if self._is_hit(self.faults.crashes_per_s):
                self._crash()
        self._at(BEAT_S, self._tick)

    # -- what processes do -------------------------------------------------------------------------------------------

    def _beat(self, process: Process) -> None:
        if not process.lives:
            return
        if self._is_hit(self.faults.kills_per_s):
            self._kill(process)
            return
        if self._is_hit(self.faults.stops_per_s):
            self._stop(process)
        if process.stopped_until_s > self.now:
            self._at(process.stopped_until_s - self.now, lambda: self._beat(process))
            return
        if self._wants_change and self.random.random() < 0.1:
            process.goal_bytes = self.random.randint(0, CAPACITY)
        self._send(process, process.side.greeting())
        if process.is_producer:
            self._lend(process)
        else:
            self._borrow(process)
        self._at(BEAT_S * (0.8 + 0.4 * self.random.random()), lambda: self._beat(process))

    def _lend(self, process: Process) -> None:
        """Its pool gives way to what it wants to lend, and takes what is not promised: there must be room."""
        lender, foreign = process.lender, self.foreign_bytes(process.side.name)
        lender.target_bytes = process.goal_bytes
        process.own_bytes = min(process.own_bytes, CAPACITY - process.goal_bytes)
        allowed = min(CAPACITY - lender.promised_bytes, CAPACITY - process.goal_bytes)
        if allowed > process.own_bytes:
            assert allowed + foreign <= CAPACITY, "a consumer holds what the producer never promised, or has got back"
            process.own_bytes = allowed
        message = lender.say(process.own_bytes, foreign)
        if message is not None:
            self._send(process, message)
        if any(
            lease.is_owed for lease in process.side.lent()
        ):  # one that looks whenever it can, though it sees nothing
            self._send(process, Observe(process.side.name, process.side.stamp, foreign))

    def _borrow(self, process: Process) -> None:
        self._free(process)
        self._allocate(process)
        wanted = process.goal_bytes - sum(lease.num_bytes for lease in process.taken.values())
        if wanted > 0 and not process.side.open_requests:
            process.borrower.ask(self._shards(wanted))
        elif self.random.random() < 0.1:
            for number in list(process.side.open_requests):
                process.borrower.cancel(number)
        for message in process.borrower.say():
            self._send(process, message)

    def _shards(self, wanted: int) -> list[Shard]:
        producers = [name for name, process in self.processes.items() if process.is_producer]
        names = [None, *self.random.sample(producers, 1)]
        first = self.random.randint(1, wanted)
        sizes = [first] if self.random.random() < 0.5 or first == wanted else [first, wanted - first]
        return [Shard(min(size, CAPACITY), self.random.choice(names)) for size in sizes]

    def _allocate(self, process: Process) -> None:
        for lease in process.borrower.to_allocate(self.now):
            dice = self.random.random()
            if dice < 0.1:
                process.borrower.refused(lease.lease_id, "no range is free")
            elif dice < 0.8:
                room = CAPACITY - self.processes[lease.producer].own_bytes - self.foreign_bytes(lease.producer)
                assert room >= lease.num_bytes, "granted bytes are not there"
                assert lease.lease_id not in process.taken, "a lease was allocated twice"
                process.taken[lease.lease_id] = lease
                process.borrower.allocated(lease.lease_id)

    def _free(self, process: Process) -> None:
        """What is recalled, by its deadline at the latest; what is too much, sooner or later."""
        assert set(process.borrower.allocated_ids) == set(process.taken)
        for lease_id, due_s in process.borrower.to_free().items():
            if self.random.random() < 0.3 or due_s <= self.now + BEAT_S:
                self._give_back(process, lease_id)
        too_much = sum(lease.num_bytes for lease in process.taken.values()) - process.goal_bytes
        for lease_id, lease in list(process.taken.items()):
            if lease.num_bytes <= too_much:
                too_much -= lease.num_bytes
                self._give_back(process, lease_id)

    def _give_back(self, process: Process, lease_id: LeaseId) -> None:
        process.leaving[lease_id] = process.taken.pop(lease_id)
        process.borrower.freed(lease_id)
        self._at(self.random.random() * BEAT_S, lambda: process.leaving.pop(lease_id, None))
