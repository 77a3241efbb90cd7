"""Engines of the lease world: they lend and borrow by their orders, and their bytes are really taken.

Physical allocations are kept here: an allocation, or a growth of a pool, that finds no room fails the run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from floodplain.leases.member import Borrower, Lender, MemberSide
from floodplain.leases.messages import Leave, Message, Observe
from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseId

TTL_S = 10.0
BEAT_S = 1.0
DEADLINE_S = 4.0
CAPACITY = 16


class Timeline:
    """Scheduled events; ``now`` is the time of the current event."""

    def __init__(self) -> None:
        self.now, self._num_events = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def after(self, delay_s: float, happen: Callable[[], object]) -> None:
        """Schedule an event in this many seconds."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_events, happen))

    def run(self, seconds: float) -> Iterator[None]:
        """Execute all events until ``seconds`` from now; one step for each."""
        end_s = self.now + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            yield
        self.now = end_s


@dataclass(eq=False)
class Process:
    """An engine that lends its device, or borrows.

    Attributes:
        side: Its view of its leases.
        is_producer: Whether it has a device to lend.
        haste: The probability that it allocates a grant at a beat.
        own_bytes: Bytes of its device in its own pool.
        goal_bytes: Producer: bytes to lend; consumer: bytes to borrow.
        taken: Leases that it has allocated on others' devices.
        leaving: Leases reported as freed whose memory the driver still holds.
        stopped_until_s: It is stopped until then.
        cut_since_s: When the coordinator could be reached for the last time before ``cut_until_s``.
        cut_until_s: None of its messages, and no reply to it, is carried before.
        lives: False after SIGKILL.
    """

    side: MemberSide
    is_producer: bool
    haste: float = 0.8
    own_bytes: int = 0
    goal_bytes: int = 0
    taken: dict[LeaseId, Lease] = field(default_factory=dict)
    leaving: dict[LeaseId, Lease] = field(default_factory=dict)
    stopped_until_s: float = 0.0
    cut_since_s: float = 0.0
    cut_until_s: float = 0.0
    lives: bool = True

    def __post_init__(self) -> None:
        self.lender = Lender(self.side, CAPACITY, DEADLINE_S)
        self.borrower = Borrower(self.side)

    def is_cut_off(self, now: float) -> bool:
        """Return whether the network carries nothing between it and the coordinator."""
        return now < self.cut_until_s

    def die(self) -> None:
        """Kill the process; its allocations end with it."""
        self.lives = False
        self.taken.clear()
        self.leaving.clear()
        self.own_bytes = 0


class Engines:
    """All processes, and their actions at a beat.

    Args:
        random: Chooses their goals.
        time: Schedules their actions.

    Attributes:
        processes: The last process that was started under each name.
        zombies: Earlier ones that may still live.
        gone: Names of broken devices that have not been replaced.
        void: Leases that were allocated on a device when it broke: their memory is lost.
        wants_change: Whether goals change.
    """

    def __init__(self, random: Random, time: Timeline) -> None:
        self.random, self.time = random, time
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.gone: set[str] = set()
        self.void: set[LeaseId] = set()
        self.wants_change = True

    @property
    def living(self) -> list[Process]:
        """Processes that have their bytes, whether they are stopped or not."""
        return [process for process in (*self.processes.values(), *self.zombies) if process.lives]

    def foreign_bytes(self) -> defaultdict[str, int]:
        """Return the bytes of each device that others really hold."""
        held: defaultdict[str, int] = defaultdict(int)
        for process in self.living:
            for leases in (process.taken, process.leaving):
                for lease_id, lease in leases.items():
                    held[lease.producer] += 0 if lease_id in self.void else lease.num_bytes
        return held

    def allocatable_bytes(self) -> defaultdict[str, int]:
        """Return the bytes of each device that consumers may allocate now, by their own state."""
        allocatable: defaultdict[str, int] = defaultdict(int)
        for process in self.living:
            for lease in process.borrower.to_allocate(self.time.now) if process.side.known else ():
                allocatable[lease.producer] += 0 if lease.producer in self.gone else lease.num_bytes
        return allocatable

    def break_device(self, process: Process) -> None:
        """Lose a device with its contents and its process."""
        process.die()
        self.gone.add(process.side.name)
        taken = (lease for process in self.living for lease in (*process.taken.values(), *process.leaving.values()))
        self.void.update(lease.lease_id for lease in taken if lease.producer == process.side.name)

    def act(self, process: Process) -> Iterator[Message]:
        """Execute one beat of a process; yields its messages."""
        if self.wants_change and self.random.random() < 0.1:
            process.goal_bytes = self.random.randint(0, CAPACITY)
        yield process.side.greeting()
        yield from self._lend(process) if process.is_producer else self._borrow(process)

    def end(self, process: Process) -> Iterator[Message]:
        """Yield the last messages of a process that ends normally."""
        if process.is_producer:
            message = process.lender.say_last(self.foreign_bytes()[process.side.name])
            yield from () if message is None else (message,)
        yield Leave(process.side.name, process.side.stamp.generation)

    def _lend(self, process: Process) -> Iterator[Message]:
        """Shrink the pool by the bytes to lend, and grow it by bytes that are not promised: there must be room."""
        lender, foreign = process.lender, self.foreign_bytes()[process.side.name]
        lender.target_bytes = process.goal_bytes
        process.own_bytes = min(process.own_bytes, CAPACITY - process.goal_bytes)
        allowed = min(CAPACITY - lender.promised_bytes, CAPACITY - process.goal_bytes)
        if allowed > process.own_bytes:
            assert allowed + foreign <= CAPACITY, "a consumer holds what the producer never promised, or has got back"
            process.own_bytes = allowed
        message = lender.say(process.own_bytes, foreign)
        if message is not None:
            yield message
        if any(lease.is_owed for lease in process.side.lent()):  # it observes whenever it can, even if nothing is free
            yield Observe(process.side.name, process.side.stamp, foreign)

    def _borrow(self, process: Process) -> Iterator[Message]:
        self._free(process)
        self._allocate(process)
        wanted = process.goal_bytes - sum(lease.num_bytes for lease in process.taken.values())
        if wanted > 0 and not process.side.open_requests:
            process.borrower.ask(self._shards(wanted))
        elif self.random.random() < 0.1:
            for number in list(process.side.open_requests):
                process.borrower.cancel(number)
        yield from process.borrower.say()

    def _shards(self, wanted: int) -> list[Shard]:
        producers = [name for name, process in self.processes.items() if process.is_producer]
        names = [None, *self.random.sample(producers, 1)]
        first = self.random.randint(1, wanted)
        sizes = [first] if self.random.random() < 0.5 or first == wanted else [first, wanted - first]
        return [Shard(min(size, CAPACITY), self.random.choice(names)) for size in sizes]

    def _allocate(self, process: Process) -> None:
        for lease in process.borrower.to_allocate(self.time.now):
            dice = self.random.random()
            if lease.producer in self.gone:
                process.borrower.refused(lease.lease_id, "the device does not answer")
            elif dice < 0.1 * process.haste:
                process.borrower.refused(lease.lease_id, "no range is free")
            elif dice < process.haste:
                room = CAPACITY - self.processes[lease.producer].own_bytes - self.foreign_bytes()[lease.producer]
                assert room >= lease.num_bytes, "granted bytes are not there"
                assert lease.lease_id not in process.taken, "a lease was allocated twice"
                self._check_is_heard_of(process)
                process.taken[lease.lease_id] = lease
                process.borrower.allocated(lease.lease_id, self.time.now)

    def _check_is_heard_of(self, process: Process) -> None:
        """A process that is cut off allocates nothing new after a TTL, even if no other one needs the bytes."""
        now = self.time.now
        assert not process.is_cut_off(now) or now <= process.cut_since_s + TTL_S, "it is cut off, and allocates"

    def _free(self, process: Process) -> None:
        """Free recalled leases, at the latest by their deadlines, and leases beyond the goal."""
        assert set(process.borrower.allocated_ids) == set(process.taken)
        for lease_id, due_s in process.borrower.to_free().items():
            if self.random.random() < 0.3 or due_s <= self.time.now + BEAT_S:
                self._give_back(process, lease_id)
        too_much = sum(lease.num_bytes for lease in process.taken.values()) - process.goal_bytes
        for lease_id, lease in list(process.taken.items()):
            if lease.num_bytes <= too_much:
                too_much -= lease.num_bytes
                self._give_back(process, lease_id)

    def _give_back(self, process: Process, lease_id: LeaseId) -> None:
        process.leaving[lease_id] = process.taken.pop(lease_id)
        process.borrower.freed(lease_id)
        self.time.after(self.random.random() * BEAT_S, lambda: process.leaving.pop(lease_id, None))
