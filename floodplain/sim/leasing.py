"""Engines that lend and borrow in virtual time: the product's lender and PEER tier around virtual memory and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, cast

from floodplain.core.backups import BackupTable
from floodplain.core.plan import Relocation, StepPlan
from floodplain.core.shrink import commit_shrink, plan_shrink
from floodplain.core.tiers import Tier
from floodplain.lending.membership import LentDevice
from floodplain.lending.peer_tier import PeerParts, PeerTier
from floodplain.lending.pool_lender import PoolLender, report_load
from floodplain.policy.lending import LendingPolicy, LendingSettings, PoolLoad
from floodplain.runtime.loop import Loop
from floodplain.sim.coordinator import VirtualAgent, VirtualCoordinator
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from floodplain.sim.scenario import BorrowPart, CoordinatorPart

LOOK_S = 0.02
"""Seconds between two looks of an engine at its leases and its load; they happen at the next boundary of its steps."""
MOST_MOVED_BYTES = 2**31
"""What a lender's pool shrinks or grows by at one look: a GPU is assumed to map or unmap that much in 10 ms."""
SAMPLE_S = 1.0
"""Seconds between two samples of what borrowers need."""
OUTCOMES = ("granted", "recalled", "returned", "lost")


class VirtualDevices:
    """The bytes that borrowers hold, by lender, how often each lender's device was replaced, and moved bytes.

    ``moved_bytes``: of KV that left lent memory for host memory, before it was given back.
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.lives: Counter[str] = Counter()
        self.moved_bytes = 0

    def replace(self, name: str) -> None:
        """Put an empty device in the place of one that is lost."""
        self.held[name] = 0
        self.lives[name] += 1


@dataclass(slots=True)
class VirtualExtent:
    """Bytes of a lender's device, until ``close``; ``address`` names no memory."""

    devices: VirtualDevices
    producer: str
    num_bytes: int
    life: int
    address: int = 0

    def close(self) -> None:
        """Give the bytes back, if their device is still there; a second call does nothing."""
        if self.life == self.devices.lives[self.producer]:
            self.devices.held[self.producer] -= self.num_bytes
        self.num_bytes = 0


@dataclass(slots=True)
class VirtualPeerMemory:
    """Allocates extents by whole bytes, as ``memory.peer.PeerMemory``."""

    devices: VirtualDevices
    page_bytes: int = 1

    def allocate(self, producer: str, num_bytes: int) -> VirtualExtent:
        """Take the bytes of a granted lease: the lender has left them."""
        self.devices.held[producer] += num_bytes
        return VirtualExtent(self.devices, producer, num_bytes, self.devices.lives[producer])


class VirtualPeerSlots:
    """Chunks of slots without content, as ``memory.peer.PeerSlots``."""

    def __init__(self, block_bytes: int, lease_bytes: int, num_bytes: int) -> None:
        self.chunk_slots = max(1, lease_bytes // block_bytes)
        self.chunk_bytes = self.chunk_slots * block_bytes
        self.max_chunks = max(1, num_bytes // self.chunk_bytes)
        self._extents: dict[int, VirtualExtent] = {}

    def slots_of(self, chunk: int) -> range:
        """The numbers of a chunk's slots."""
        return range(chunk * self.chunk_slots, (chunk + 1) * self.chunk_slots)

    def num_copies(self, chunk: int) -> int:
        """Always 0: a chunk counts as used while a request needs what is there."""
        return 0

    def add(self, chunk: int, extent: VirtualExtent) -> None:
        """Make an extent the memory of a chunk."""
        self._extents[chunk] = extent

    def remove(self, chunk: int) -> None:
        """Free a chunk's memory; a second call does nothing."""
        if chunk in self._extents:
            self._extents.pop(chunk).close()

    def close(self) -> None:
        """Free the memory of all chunks, as the end of the process does."""
        for chunk in list(self._extents):
            self.remove(chunk)


class VirtualMover:
    """Copies between the PEER and the HOST tier that take the links' time, as ``memory.peer.SlotMover``."""

    def __init__(
        self, environment: Environment, links: VirtualLinks, devices: VirtualDevices, block_bytes: int
    ) -> None:
        self._environment, self._links, self._devices = environment, links, devices
        self._block_bytes = block_bytes
        self._open: list[tuple[float, int]] = []

    def submit(self, relocation: Relocation) -> None:
        """Start a copy."""
        if relocation.sources[0].tier is Tier.PEER:
            self._devices.moved_bytes += len(relocation.sources) * self._block_bytes
        self._open.append((self._links.relocate(relocation, self._environment.now), relocation.relocation_id))

    def poll(self) -> list[tuple[int, Sequence[int]]]:
        """The copies that have ended since the last call, and which of their blocks did not arrive: none."""
        now = self._environment.now
        ended = [(relocation_id, ()) for end_s, relocation_id in self._open if end_s <= now]
        self._open = [one for one in self._open if one[0] > now]
        return list(ended)

    def close(self) -> None:
        """Forget the copies under way."""
        self._open.clear()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What ``lending.peer_tier.PeerParts`` has."""

    memory: VirtualPeerMemory
    slots: VirtualPeerSlots
    mover: VirtualMover


class VirtualPool:
    """The KV pool of a simulated engine as a lender (``lending.pool_lender.Northbound``): its bytes are its blocks."""

    def __init__(self, loop: Loop, block_bytes: int, least_blocks: int) -> None:
        self.block_bytes = block_bytes
        self._loop, self._full_blocks = loop, loop.state.ledger.num_blocks
        self.least_blocks = min(least_blocks, self._full_blocks)
        self._num_left = 0

    @property
    def full_bytes(self) -> int:
        """Bytes of the pool while nothing is lent."""
        return self._full_blocks * self.block_bytes

    @property
    def quantum_bytes(self) -> int:
        """The unit by which it shrinks and grows: a block."""
        return self.block_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of the pool now."""
        return self._loop.state.ledger.num_blocks * self.block_bytes

    def report(self, now: float) -> PoolLoad:
        """The engine's load. Requests that no plan has seen do not wait: our engine takes them after its boundary."""
        num_waiting = self._num_left if self._loop.has_unfinished else 0
        return replace(report_load(self._loop, self._full_blocks, now), num_waiting=num_waiting)

    def note_plan(self) -> None:
        """Count the requests that the plan of this moment has left out."""
        self._num_left = len(self._loop.state.waiting) + len(self._loop.state.swapped)

    def give_way(self, to_bytes: int) -> None:
        """Shrink by some blocks that hold nothing of a request."""
        self.shrink(max(to_bytes, self.own_bytes - MOST_MOVED_BYTES))

    def shrink(self, to_bytes: int) -> None:
        """Shrink as far towards ``to_bytes`` as used blocks allow, and never below what the longest request needs."""
        ledger, target = self._loop.state.ledger, max(-(-to_bytes // self.block_bytes), self.least_blocks)
        if target < ledger.num_blocks:
            self._loop.remap_blocks(commit_shrink(ledger, plan_shrink(ledger, target)))

    def take_back(self, to_bytes: int) -> None:
        """Grow by some blocks, up to ``to_bytes``."""
        ledger = self._loop.state.ledger
        num_blocks = min(to_bytes - self.own_bytes, MOST_MOVED_BYTES) // self.block_bytes
        absent = (block for block in range(ledger.num_indexed_blocks) if not ledger.survey(block, 1)[0])
        ledger.add_memory(list(islice(absent, num_blocks)))


class Leasing:
    """The coordinator of a scenario, and the engines that are its members."""

    def __init__(self, environment: Environment, coordinator: CoordinatorPart, borrow: BorrowPart) -> None:
        self.devices = VirtualDevices()
        self.coordinator = VirtualCoordinator(environment, coordinator.ttl, coordinator.pairs)
        self.tiers: list[PeerTier] = []
        self._borrowers: dict[str, tuple[BackupTable, int]] = {}
        self._needed: list[tuple[float, int]] = []
        self._environment, self._part, self._borrow = environment, coordinator, borrow
        self._instances = count(1)
        for start_s, end_s in coordinator.down:
            environment.schedule(start_s, self.coordinator.stop)
            environment.schedule(end_s, self.coordinator.start)

    def lend(self, name: str, instance: VirtualInstance, block_bytes: int) -> Callable[[], None]:
        """Have an engine that starts lend what its load leaves; returns what to call when it dies."""
        loop = instance.loop
        pool = VirtualPool(loop, block_bytes, -(-loop.state.config.max_model_len // loop.state.ledger.block_tokens))
        pool.shrink(pool.full_bytes - self.devices.held[name])  # borrowers of its last life
        device = LentDevice(
            capacity_bytes=pool.full_bytes,
            foreign_bytes=lambda: self.devices.held[name],
            deadline_s=self._part.deadline,
        )
        agent = self._join(name, device)
        policy = LendingPolicy(LendingSettings(), pool.least_blocks)
        lender = PoolLender(pool, policy, agent.membership, lambda: agent.can_offer)
        on_step = instance.on_step

        def note(plan: StepPlan, now: float) -> None:
            pool.note_plan()
            if on_step is not None:
                on_step(plan, now)

        instance.on_step = note
        self._look(instance, lambda: lender.at_boundary(self._environment.now))
        return agent.die

    def borrow(self, name: str, instance: VirtualInstance, block_bytes: int) -> Callable[[], None]:
        """Have an engine that starts borrow swap space; returns what to call when it dies."""
        agent, part, loop = self._join(name), self._borrow, instance.loop
        slots = VirtualPeerSlots(block_bytes, part.lease, part.memory)
        mover = VirtualMover(self._environment, instance.links, self.devices, block_bytes)
        parts = cast(PeerParts, _Parts(VirtualPeerMemory(self.devices), slots, mover))
        tier = PeerTier(agent.membership, parts, loop.relocations, idle_s=part.idle)
        self.tiers.append(tier)

        def look() -> None:
            tier.at_boundary(self._environment.now)
            self._note_need()

        self._borrowers[name] = loop.state.backups, block_bytes
        self._look(instance, look, tier.hurry)

        def die() -> None:
            slots.close()
            del self._borrowers[name]
            agent.die()

        return die

    def lose(self, name: str) -> None:
        """Lose a lender's device with all that is on it, and report it to the coordinator."""
        self.devices.replace(name)
        self.coordinator.report_lost(name)

    def result(self) -> dict[str, Any]:
        """What became of leases, for a benchmark result."""
        totals = self.coordinator.totals
        return {
            "bytes": {name: totals.num_bytes[name] for name in OUTCOMES} | {"live": sum(totals.live.values())},
            "leases": {name: totals.num_leases[name] for name in OUTCOMES},
            "forced": sum(tier.totals.num_forced for tier in self.tiers),
            "moved_to_host_bytes": self.devices.moved_bytes,
            "lent": {"t": [t for t, _ in totals.samples], "bytes": [num_bytes for _, num_bytes in totals.samples]},
            "needed": {"t": [t for t, _ in self._needed], "bytes": [num_bytes for _, num_bytes in self._needed]},
            "messages": dict(self.coordinator.num_messages),
        }

    def _note_need(self) -> None:
        """Sample the bytes of swap space that requests of all borrowers need."""
        now = self._environment.now
        if not self._needed or now - self._needed[-1][0] >= SAMPLE_S:
            kept = (
                len(backups.kept_slots(tier)) * block_bytes
                for backups, block_bytes in self._borrowers.values()
                for tier in backups.slots
            )
            self._needed.append((now, sum(kept)))

    def _join(self, name: str, device: LentDevice | None = None) -> VirtualAgent:
        return VirtualAgent(self.coordinator, name, f"{name}-{next(self._instances)}", device)

    def _look(self, instance: VirtualInstance, look: Callable[[], None], hurry: Callable[[], object] = int) -> None:
        """Look at the next boundary after each ``LOOK_S``, until the engine dies or the simulation is over."""

        def at_boundary() -> None:
            look()
            if not self.coordinator.is_over:
                self._environment.schedule(self._environment.now + LOOK_S, wait)

        def wait() -> None:
            hurry()
            instance.at_boundary(at_boundary)

        wait()
