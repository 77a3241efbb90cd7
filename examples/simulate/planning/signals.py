"""Members whose load is a signal over time: lenders and borrowers at the level of leases, without steps and requests.

What they decide is the product's: how much to lend and when to recall (``policy.lending``), which leases to request and
to return (``lending``), and all messages. A lender's load and a borrower's need of swap space are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import cast

from floodplain.leases.states import LeaseId
from floodplain.lending.membership import DEADLINE_S, LentDevice
from floodplain.lending.peer_tier import MARGIN_S, ChunkUse, IdleChunks
from floodplain.lending.pool_lender import PoolLender
from floodplain.lending.requests import LeaseRequests
from floodplain.memory.peer.memory import Extent, PeerMemory
from floodplain.policy.lending import LendingPolicy, LendingSettings, PoolLoad
from floodplain.sim.coordinator import VirtualAgent, VirtualCoordinator
from floodplain.sim.leasing import VirtualDevices, VirtualPeerMemory


@dataclass(frozen=True, slots=True)
class PoolSignal:
    """A lender's own load at a time: blocks that requests use, requests that wait, requests so far."""

    num_used_blocks: int
    num_waiting: int
    num_arrived: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """What all members have in common.

    Attributes:
        block_bytes: Of one KV block of a lender and of a borrower.
        full_blocks: Of a lender's pool while nothing is lent.
        least_blocks: A lender's pool never has fewer.
        lease_bytes: Of one lease, in whole blocks of a borrower.
        most_bytes: The most that a borrower leases.
        idle_s: Seconds after which a borrower returns an idle lease; 0 keeps all.
        bandwidth: Bytes per second of a borrower's copies from lent memory to host memory.
        look_s: Seconds between two looks of a member at its load.
    """

    lender_block_bytes: int
    full_blocks: int
    least_blocks: int
    borrower_block_bytes: int
    lease_bytes: int
    most_bytes: int
    idle_s: float
    bandwidth: float
    look_s: float


class SignalPool:
    """A lender's pool (``lending.pool_lender.Northbound``); it shrinks and grows at once, down to what is used."""

    def __init__(self, settings: SignalSettings, signal: Callable[[float], PoolSignal], held_bytes: int) -> None:
        self.block_bytes = self.quantum_bytes = settings.lender_block_bytes
        self._settings, self._signal = settings, signal
        self._num_blocks = settings.full_blocks - -(-held_bytes // self.block_bytes)
        self._used_blocks = 0

    @property
    def full_bytes(self) -> int:
        """Bytes of the pool while nothing is lent."""
        return self._settings.full_blocks * self.block_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of the pool now."""
        return self._num_blocks * self.block_bytes

    def report(self, now: float) -> PoolLoad:
        """The load of the signal. What does not fit into the pool waits: one request more."""
        signal = self._signal(now)
        self._used_blocks = min(signal.num_used_blocks, self._num_blocks)
        return PoolLoad(
            now=now,
            num_waiting=signal.num_waiting + (signal.num_used_blocks > self._num_blocks),
            num_used_blocks=self._used_blocks,
            num_blocks=self._num_blocks,
            full_blocks=self._settings.full_blocks,
            num_arrived=signal.num_arrived,
        )

    def give_way(self, to_bytes: int) -> None:
        """Shrink, as far as used blocks allow."""
        wanted = max(-(-to_bytes // self.block_bytes), self._used_blocks, self._settings.least_blocks)
        self._num_blocks = min(self._num_blocks, wanted)

    def take_back(self, to_bytes: int) -> None:
        """Grow."""
        self._num_blocks = max(self._num_blocks, to_bytes // self.block_bytes)


class SignalMembers:
    """Lenders and borrowers on one coordinator, by name.

    Attributes:
        counts: Bytes that recalls ``moved`` to host memory, and that were ``lost`` (and are computed again).
        short_byte_s: Bytes times seconds that borrowers needed and had no lease for, at their looks.
        needed_byte_s: Bytes times seconds that they needed.
    """

    def __init__(self, coordinator: VirtualCoordinator, settings: SignalSettings) -> None:
        self.coordinator, self.settings = coordinator, settings
        self.devices = VirtualDevices()
        self.counts: Counter[str] = Counter()
        self.short_byte_s = self.needed_byte_s = 0.0
        self._deaths: dict[str, Callable[[], None]] = {}
        self._lives = count(1)

    def lend(self, name: str, signal: Callable[[float], PoolSignal]) -> None:
        """Start a lender."""
        settings, environment = self.settings, self.coordinator.environment
        pool = SignalPool(settings, signal, self.devices.held[name])
        device = LentDevice(
            capacity_bytes=pool.full_bytes, foreign_bytes=lambda: self.devices.held[name], deadline_s=DEADLINE_S
        )
        agent = VirtualAgent(self.coordinator, name, f"{name}-{next(self._lives)}", device)
        policy = LendingPolicy(LendingSettings(), settings.least_blocks)
        lender = PoolLender(pool, policy, agent.membership, lambda: agent.can_offer, settings.look_s / 2)
        self._live(name, agent, lambda: lender.at_boundary(environment.now), agent.die)

    def borrow(self, name: str, need: Callable[[float], int]) -> None:
        """Start a borrower; ``need`` has the bytes of swap space that its requests need at a time."""
        agent = VirtualAgent(self.coordinator, name, f"{name}-{next(self._lives)}")
        borrower = SignalBorrower(self, agent, need)
        self._live(name, agent, borrower.look, borrower.die)

    def kill(self, name: str, *, is_device_lost: bool) -> None:
        """End a member; if its device is lost, so are all bytes that it has lent, and the coordinator is told so."""
        self._deaths.pop(name)()
        if is_device_lost:
            self.devices.replace(name)
            self.coordinator.report_lost(name)

    def _live(self, name: str, agent: VirtualAgent, look: Callable[[], None], die: Callable[[], None]) -> None:
        environment, look_s = self.coordinator.environment, self.settings.look_s

        def again() -> None:
            if agent.is_dead or self.coordinator.is_over:
                return
            look()
            environment.schedule(environment.now + look_s, again)

        self._deaths[name] = die
        environment.schedule(environment.now, again)


class SignalBorrower:
    """A borrower whose leases are filled one after the other with the bytes that it needs."""

    def __init__(self, members: SignalMembers, agent: VirtualAgent, need: Callable[[float], int]) -> None:
        settings = members.settings
        self._members, self._settings, self._agent, self._need = members, settings, agent, need
        self._environment = members.coordinator.environment
        self._chunk_slots = max(1, settings.lease_bytes // settings.borrower_block_bytes)
        self._chunk_bytes = self._chunk_slots * settings.borrower_block_bytes
        self._most_chunks = settings.most_bytes // self._chunk_bytes
        self._idle = IdleChunks(settings.idle_s, self._chunk_slots, self._most_chunks)
        memory = cast(PeerMemory, VirtualPeerMemory(members.devices))
        self._requests = LeaseRequests(agent.membership, memory, self._chunk_bytes)
        self._held: dict[LeaseId, Extent] = {}
        self._leaving: dict[LeaseId, int] = {}
        self._link_free_s = 0.0
        self._looked_s = self._environment.now
        agent.membership.on_news = self._hear

    def look(self) -> None:
        """Return idle leases, and request what is missing."""
        now, held = self._environment.now, {i: 0 for i in self._held if i not in self._leaving}
        needed = self._count_needed()
        self._note_shortage(now, needed, len(held))
        used = {i: self._used_slots(place, needed) for place, i in enumerate(held)}
        if self._idle.is_due(now):
            uses = {i: ChunkUse(0, slots) for i, slots in used.items()}
            for lease_id in self._idle.choose(now, uses, needed > 0):
                self._free(lease_id)
        num_free = len(held) * self._chunk_slots - sum(used.values())
        self._idle.note_room(len(self._held), num_free, needed > 0)
        if not self._leaving:
            self._requests.follow(self._idle.num_wanted - len(self._held))

    def die(self) -> None:
        """End the process; its bytes on lenders' devices are free."""
        for extent in self._held.values():
            extent.close()
        self._agent.die()

    def _hear(self) -> None:
        """Use what was granted, and begin to empty what was recalled."""
        needed = self._count_needed()
        places = {i: place for place, i in enumerate(self._held)}
        for lease_id, left_s in self._agent.membership.to_free().items():
            if lease_id in self._held and lease_id not in self._leaving:
                self._empty(lease_id, left_s, self._used_slots(places[lease_id], needed))
        for lease in self._requests.take_grants():
            extent = self._requests.allocate(lease)
            if extent is not None:
                self._held[lease.lease_id] = extent
        if not self._leaving:
            self._requests.follow(self._idle.num_wanted - len(self._held))

    def _empty(self, lease_id: LeaseId, left_s: float, used_slots: int) -> None:
        """Copy what is needed to host memory until the deadline, and free the lease; what is left then is lost."""
        now, num_bytes = self._environment.now, used_slots * self._settings.borrower_block_bytes
        begin_s, due_s = max(now, self._link_free_s), now + max(0.0, left_s - MARGIN_S)
        end_s = min(begin_s + num_bytes / self._settings.bandwidth, due_s)
        moved = min(num_bytes, round(max(0.0, end_s - begin_s) * self._settings.bandwidth))
        self._members.counts["moved"] += moved
        self._members.counts["lost"] += num_bytes - moved
        self._link_free_s = max(begin_s, end_s)
        self._leaving[lease_id] = moved
        self._environment.schedule(max(now, end_s), partial(self._free, lease_id))

    def _free(self, lease_id: LeaseId) -> None:
        if not self._agent.is_dead and lease_id in self._held:
            self._held.pop(lease_id).close()
            self._leaving.pop(lease_id, None)
            self._agent.membership.freed(lease_id)

    def _count_needed(self) -> int:
        """Blocks that are needed and fit into as many leases as there may be."""
        needed = self._need(self._environment.now) // self._settings.borrower_block_bytes
        return min(needed, self._most_chunks * self._chunk_slots)

    def _used_slots(self, place: int, needed: int) -> int:
        return min(max(0, needed - place * self._chunk_slots), self._chunk_slots)

    def _note_shortage(self, now: float, needed: int, num_held: int) -> None:
        elapsed_s, self._looked_s = now - self._looked_s, now
        block_bytes = self._settings.borrower_block_bytes
        self._members.needed_byte_s += needed * block_bytes * elapsed_s
        self._members.short_byte_s += max(0, needed - num_held * self._chunk_slots) * block_bytes * elapsed_s
