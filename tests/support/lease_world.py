"""A world for the lease protocol, by seed: devices whose bytes are really taken, processes that exit, a network.

Messages are late, lost and doubled; processes are stopped, killed, replaced, and cut off from the coordinator; devices
break and are replaced by others; the coordinator exits, also between a change and its commit, and restarts from its
store. Each process acts on the replies it got. The laws are about physical allocations, which are recorded separately.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from floodplain.leases.book import LeaseBook
from floodplain.leases.member import MemberSide
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.rules import LeaseLimits
from floodplain.leases.states import TRANSITIONS, Lease, LeaseId
from floodplain.leases.table import Changes
from tests.support.lease_engines import BEAT_S, CAPACITY, TTL_S, Engines, Process, Timeline


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates of faults.

    Attributes:
        lost: Share of messages, either way.
        doubled: Share of messages, either way.
        max_delay_s: Of a message, either way; so they overtake each other.
        stops_per_s: Of every process, for up to three TTLs; another process takes the name of some stopped consumers.
        cuts_per_s: Of every process from the coordinator, likewise; it keeps running, and messages in flight arrive.
        kills_per_s: Of every process; another of its name is started within ``max_absence_s``.
        max_absence_s: See ``kills_per_s``.
        losses_per_s: Of every device, with its process; an operator reports it, and then a new one gets its name.
        crashes_per_s: Of the coordinator.
    """

    lost: float = 0.0
    doubled: float = 0.0
    max_delay_s: float = 0.1
    stops_per_s: float = 0.0
    cuts_per_s: float = 0.0
    kills_per_s: float = 0.0
    max_absence_s: float = 2 * TTL_S
    losses_per_s: float = 0.0
    crashes_per_s: float = 0.0


LIMITS = LeaseLimits(
    least_lease_bytes=2,
    max_leases=3,
    max_borrowed_bytes=14,
    max_leases_on_device=4,
    max_members=7,
    forget_after_s=0.5,
)
"""Narrow limits: members are forgotten while others still name them, and requests are often too many."""
WIDE_LIMITS = LeaseLimits(forget_after_s=0.5)


class LeaseWorld:
    """See the module. ``run`` executes events; ``settle`` ends all faults and expects all bytes back."""

    def __init__(self, seed: int, faults: Faults, num_producers: int = 2, num_consumers: int = 3) -> None:
        self.random, self.faults = Random(seed), faults
        self.time = Timeline()
        self.engines = Engines(self.random, self.time)
        self.stored_members: dict[str, Member] = {}
        self.stored_leases: dict[LeaseId, Lease] = {}
        self.stored_floor = 0
        self.granted: set[LeaseId] = set()
        self.seen: Counter[str] = Counter()
        self.limits = WIDE_LIMITS if seed % 4 else LIMITS
        self.book: LeaseBook | None = LeaseBook(TTL_S, self.time.now, limits=self.limits)
        for index in range(num_producers + num_consumers):
            is_producer = index < num_producers
            self._start(f"p{index}" if is_producer else f"c{index - num_producers}", is_producer)
        self.time.after(BEAT_S, self._tick)

    def run(self, seconds: float) -> None:
        """Execute all events until ``seconds`` from now, and check the laws after each."""
        for _ in self.time.run(seconds):
            self.check()

    def settle(self) -> None:
        """End all faults and set all goals to 0: then nothing stays lent."""
        self.faults = Faults()
        self.run(4 * TTL_S)  # stopped ones resume, dead ones are replaced
        self.engines.wants_change = False
        counted_on = {lease_id for process in self.engines.living for lease_id in process.taken}
        assert not counted_on & self.engines.void, "what was on a broken device is still counted on"
        for zombie in self.engines.zombies:
            zombie.die()
        for process in self.engines.processes.values():
            process.goal_bytes = 0
        self.run(6 * TTL_S)
        assert not self.stored_leases, f"still lent: {self.stored_leases}"
        assert not any(self.engines.foreign_bytes().values()), "bytes stay taken"
        for name, process in self.engines.processes.items():
            assert name in self.stored_members, f"{name} lives, and is no member"
            offered = self.stored_members[name].offered_bytes
            assert not offered, f"{name} still puts up {offered} bytes"
            assert not process.is_producer or process.own_bytes == CAPACITY, "a producer did not get its bytes back"

    def check(self) -> None:
        """The laws: what others hold, or may allocate now, is leased; a producer has room for its pool."""
        leased: defaultdict[str, int] = defaultdict(int)
        for lease in self.stored_leases.values():
            leased[lease.producer] += lease.num_bytes
        foreign, allocatable = self.engines.foreign_bytes(), self.engines.allocatable_bytes()
        for name, process in self.engines.processes.items():
            held = foreign[name] + allocatable[name]
            assert held <= leased[name], f"others hold, or may take, {held} bytes of {name}: {leased[name]} are leased"
            assert process.own_bytes + foreign[name] <= CAPACITY

    # -- actions of processes, and their faults ----------------------------------------------------------------------

    def _is_hit(self, per_s: float) -> bool:
        """Draw whether an event with this rate happens in this beat."""
        return self.random.random() < per_s * BEAT_S

    def _start(self, name: str, is_producer: bool) -> None:
        instance = f"{name}-{self.random.getrandbits(64):016x}"
        haste = self.random.choice((0.8, 0.1))
        process = Process(MemberSide(name, instance, TTL_S), is_producer, haste)
        self.engines.processes[name] = process
        self.engines.gone.discard(name)
        self.time.after(self.random.random() * BEAT_S, lambda: self._beat(process))

    def _beat(self, process: Process) -> None:
        if not process.lives:
            return
        if self._is_hit(self.faults.kills_per_s):
            self._kill(process)
            return
        if process.is_producer and self._is_hit(self.faults.losses_per_s):
            self._lose(process)
            return
        if self._is_hit(self.faults.stops_per_s):
            self._stop(process)
        if self._is_hit(self.faults.cuts_per_s):
            self._cut_off(process)
        if process.stopped_until_s > self.time.now:
            self.time.after(process.stopped_until_s - self.time.now, lambda: self._beat(process))
            return
        for message in self.engines.act(process):
            self._send(process, message)
        self.time.after(BEAT_S * (0.8 + 0.4 * self.random.random()), lambda: self._beat(process))

    def _kill(self, process: Process) -> None:
        self.seen["killed"] += 1
        name = process.side.name
        if self.random.random() < 0.3:
            for message in self.engines.end(process):
                self._send(process, message)
        process.die()
        if self.engines.processes[name] is process:
            absence_s = self.random.random() * self.faults.max_absence_s
            self.time.after(absence_s, lambda: self._start(name, process.is_producer))

    def _lose(self, process: Process) -> None:
        self.seen["lost"] += 1
        self.engines.break_device(process)
        self.time.after(self.random.random() ** 3 * 2 * TTL_S, lambda: self._forget(process.side.name))

    def _stop(self, process: Process) -> None:
        self.seen["stopped"] += 1
        process.stopped_until_s = self.time.now + self.random.random() * 3 * TTL_S
        self._take_name(process)

    def _cut_off(self, process: Process) -> None:
        if not process.is_cut_off(self.time.now):
            self.seen["cut off"] += 1
            process.cut_since_s = self.time.now
            process.cut_until_s = self.time.now + self.random.random() * 3 * TTL_S
            self._take_name(process)

    def _take_name(self, process: Process) -> None:
        """Another process takes the names of some consumers that are cut off or stopped."""
        name = process.side.name
        if not process.is_producer and self.engines.processes[name] is process and self.random.random() < 0.3:
            self.seen["replaced"] += 1
            self.engines.zombies.append(process)
            self._start(name, is_producer=False)

    # -- the network -------------------------------------------------------------------------------------------------

    def _send(self, process: Process, message: Message) -> None:
        sent_s = self.time.now
        self._carry(process, lambda: self._receive(process, message, sent_s))

    def _carry(self, process: Process, deliver: Callable[[], object]) -> None:
        """Carry a message to the coordinator, or its reply back."""
        if process.is_cut_off(self.time.now):
            return
        for _ in range(2 if self.random.random() < self.faults.doubled else 1):
            if self.random.random() >= self.faults.lost:
                self.time.after(self.random.random() ** 4 * self.faults.max_delay_s, deliver)  # most delays are short

    def _answer(self, process: Process, message: Message, reply: Reply, sent_s: float) -> None:
        now = self.time.now
        if process.stopped_until_s > now:
            self.time.after(process.stopped_until_s - now, lambda: self._answer(process, message, reply, sent_s))
        elif process.lives:
            process.side.learn(message, reply, sent_s, now)

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _receive(self, process: Process, message: Message, sent_s: float) -> None:
        if self.book is None:
            return
        before = dict(self.book.rows.members)
        reply = self.book.handle(message, self.time.now)
        self.seen[f"{type(message).__name__} {reply.outcome.value}"] += 1
        if not self._crashes_before_commit():
            self._commit(message, before)
            self._carry(process, lambda: self._answer(process, message, reply, sent_s))

    def _forget(self, name: str) -> None:
        """An operator reports a lost device until that is stored; then an empty one starts under its name."""
        if self.book is not None:
            before = dict(self.book.rows.members)
            self.book.forget(name)
            if not self._crashes_before_commit():
                self._commit(None, before)
                self.time.after(self.random.random() ** 3 * TTL_S, lambda: self._start(name, is_producer=True))
                return
        self.time.after(BEAT_S, lambda: self._forget(name))

    def _crashes_before_commit(self) -> bool:
        is_hit = self._is_hit(self.faults.crashes_per_s / 20)
        if is_hit:
            self.seen["crashed before a commit"] += 1
            self._crash()
        return is_hit

    def _tick(self) -> None:
        if self.book is not None:
            before = dict(self.book.rows.members)
            self.seen["taken for dead"] += len(self.book.tick(self.time.now))
            self._commit(None, before)
            self.seen["overdue"] += len(self.book.overdue(self.time.now))
            if self._is_hit(self.faults.crashes_per_s):
                self._crash()
        self.time.after(BEAT_S, self._tick)

    def _crash(self) -> None:
        self.seen["crashed"] += 1
        self.book = None
        self.time.after(self.random.random() ** 3 * TTL_S, self._restart)

    def _restart(self) -> None:
        rows = self.stored_members.values(), self.stored_leases.values()
        self.book = LeaseBook(TTL_S, self.time.now, *rows, limits=self.limits, floor=self.stored_floor)

    def _commit(self, message: Message | None, before: dict[str, Member]) -> None:
        """Store the changes. Leased is at most offered; only stored changes are reported."""
        assert self.book is not None
        self.book.rows.check_integrity()
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
        self._forget_members(changes)
        self._check_limits()

    def _forget_members(self, changes: Changes) -> None:
        """Delete forgotten members: none of them has a lease."""
        ends = {name for lease in self.stored_leases.values() for name in (lease.producer, lease.consumer)}
        for name in changes.forgotten:
            assert name not in ends, f"{name} is forgotten and has leases"
            self.seen["forgotten"] += self.stored_members.pop(name, None) is not None
        assert changes.floor >= self.stored_floor
        self.stored_floor = changes.floor

    def _check_limits(self) -> None:
        """Consumers and devices are within their limits, and no lease is too small."""
        leases, limits = self.stored_leases.values(), self.limits
        assert all(lease.num_bytes >= limits.least_lease_bytes for lease in leases), "a lease is too small"
        of_consumer, on_device, borrowed = (defaultdict[str, int](int) for _ in range(3))
        for lease in leases:
            of_consumer[lease.consumer] += 1
            borrowed[lease.consumer] += lease.num_bytes
            on_device[lease.producer] += 1
        for counts, most in (
            (of_consumer, limits.max_leases),
            (borrowed, limits.max_borrowed_bytes),
            (on_device, limits.max_leases_on_device),
        ):
            assert max(counts.values(), default=0) <= most, f"{dict(counts)}: {most} are allowed"
        assert len(self.stored_members) <= limits.max_members, "too many members are remembered"

    def _note(self, lease: Lease) -> None:
        """Count the change; a lease is granted once, and then follows the table of transitions."""
        old = self.stored_leases.get(lease.lease_id)
        if old is None:
            assert lease.lease_id not in self.granted, "a lease was granted twice"
            self.granted.add(lease.lease_id)
            return
        events = [event for event, state in TRANSITIONS[old.state].items() if state is lease.state]
        assert events and lease.revision == old.revision + 1, f"{old.state} became {lease.state}"
        self.seen[f"{old.state.value} {events[0].value}"] += 1
