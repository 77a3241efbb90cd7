"""Neighbours of an engine under test: a real coordinator on a thread, and a consumer that allocates its leases."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from floodplain.coordinator.tokens import TokenRing
from floodplain.engine.shell import Engine
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseId
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.lent_pool import LentPool
from floodplain.lending.membership import LentDevice
from floodplain.lending.peer_tier import PeerTier
from floodplain.lending.pool_lender import PoolLender
from floodplain.memory.arena import Page
from floodplain.memory.host.device import HostDevice
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.policy.lending import LendingDecision, LendingPolicy, LendingReason, LendingSettings, PoolLoad
from tests.support import coordinators
from tests.support.coordinators import open_store
from tests.support.host_devices import open_device
from tests.support.waiting import HANG_S, wait_until

QUICK = LendingSettings(calm_s=0.5, busy_s=0.05, window_s=1.0, rate_window_s=0.4, rise_sigmas=1e9)
"""For a clock that advances by a hundredth of a second at each reading. Rates have no meaning there."""


_PAUSE_S = 0.0005


class Ticks:
    """A clock that advances by a hundredth of a second at each reading."""

    def __init__(self) -> None:
        self._num_reads = 0

    def __call__(self) -> float:
        self._num_reads += 1
        return self._num_reads / 100


@contextmanager
def coordinating(
    *, ttl_s: float = 60.0, tokens: TokenRing | None = None, sock: socket.socket | None = None
) -> Iterator[str]:
    """Yield the address of a coordinator on a thread of its own, with an empty store.

    The store is in memory if possible: each commit waits for the disk, which other processes may keep busy for seconds.
    """
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        coordinators.coordinating(open_store(Path(folder)), ttl_s=ttl_s, tokens=tokens, sock=sock) as running,
    ):
        yield running.url


class Consumer:
    """Borrows as many leases of one size as it gets, and returns recalled ones; ``turn`` does all that is due.

    Args:
        device: Of its producer, as a visitor; closed with it.
    """

    def __init__(self, url: str, device: HostDevice, lease_bytes: int, name: str = "consumer") -> None:
        self.agent = LeaseAgent(CoordinatorClient(url), name)
        self.device = device
        self.held: dict[LeaseId, list[Page]] = {}
        self.num_refused = self.num_freed = 0
        self.most_pages = 0
        self._lease_bytes = lease_bytes

    def turn(self) -> None:
        """Allocate grants, free recalled leases, request another one."""
        member = self.agent.membership
        for lease_id in member.to_free():
            self.device.release(self.held.pop(lease_id))
            member.freed(lease_id)
            self.num_freed += 1
        for lease in member.to_allocate():
            pages = self.device.allocate(lease.num_bytes // PAGE_BYTES)
            if pages is None:
                self.num_refused += 1
                member.refused(lease.lease_id, "no pages")
            else:
                self.held[lease.lease_id] = pages
                member.allocated(lease.lease_id)
        if not member.pending():
            member.ask([Shard(self._lease_bytes)])
        self.most_pages = max(self.most_pages, self.device.num_owned_pages)
        self.agent.membership.on_change()

    def close(self) -> None:
        """Free everything, and leave."""
        for lease_id in list(self.held):
            self.device.release(self.held.pop(lease_id))
            self.agent.membership.freed(lease_id)
        self.agent.close()
        self.device.close()


@contextmanager
def borrowing(consumer: Consumer) -> Iterator[Consumer]:
    """Yield a consumer that has joined; it is closed when the context is left."""
    consumer.agent.start()
    try:
        yield consumer
    finally:
        consumer.close()


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    """Step without requests until ``condition`` holds; between two steps the agent's thread runs."""

    def step() -> bool:
        engine.step()
        return condition()

    wait_until(step)


def tier_of(engine: Engine) -> PeerTier:
    """What an engine borrows for swapping."""
    assert engine.neighbours is not None and engine.neighbours.peer_tier is not None
    return engine.neighbours.peer_tier


class WildPolicy(LendingPolicy):
    """Lends by a fixed list of targets, whatever the load; each one in turn, for some looks."""

    def __init__(self, targets: Sequence[int], num_looks: int = 25) -> None:
        super().__init__(QUICK, 1)
        self._targets = targets
        self._num_looks = num_looks
        self._looks = 0

    def decide(self, load: PoolLoad) -> LendingDecision:
        self._looks += 1
        return LendingDecision(self._targets[self._looks // self._num_looks % len(self._targets)], LendingReason.CALM)


@dataclass
class Producer:
    """An engine that lends, and the laws that hold at every boundary."""

    engine: Engine
    num_moved_blocks: int = 0
    most_lent_bytes: int = 0

    def __post_init__(self) -> None:
        remap = self.engine.loop.remap_blocks

        def counted(moved: dict) -> None:  # type: ignore[type-arg]
            self.num_moved_blocks += len(moved)
            remap(moved)

        self.engine.loop.remap_blocks = counted  # type: ignore[method-assign]

    @property
    def pool(self) -> LentPool:
        """The pool that it lends from."""
        assert self.engine.neighbours is not None and self.engine.neighbours.lent_pool is not None
        return self.engine.neighbours.lent_pool

    @property
    def device(self) -> HostDevice:
        """Its own device."""
        assert isinstance(self.pool._device, HostDevice)
        return self.pool._device

    def visit(self) -> HostDevice:
        """The device, as another process would attach to it."""
        name = self.engine.config.device_name
        assert name is not None
        return open_device(name, self.device.capacity_pages * PAGE_BYTES)

    def lend(self, *targets: int) -> PoolLender:
        """Lend so many blocks from now on, whatever the load (``WildPolicy``)."""
        assert self.engine.neighbours is not None and self.engine.neighbours.lender is not None
        self.engine.neighbours.lender._policy = WildPolicy(targets)
        return self.engine.neighbours.lender

    def step_until(self, is_done: Callable[[], bool], *consumers: Consumer) -> None:
        """Step without requests until ``is_done``."""
        end_s = time.monotonic() + HANG_S
        while not is_done():
            assert time.monotonic() < end_s, "it never came to that"
            self.engine.step()
            self.check()
            self.wake()
            for consumer in consumers:
                consumer.turn()

    @property
    def num_blocks(self) -> int:
        """Current number of blocks of its pool."""
        return self.engine.loop.state.ledger.num_blocks

    @property
    def is_whole(self) -> bool:
        """Whether its pool has its full size."""
        return self.num_blocks == self.pool.full_blocks

    @property
    def num_lent_bytes(self) -> int:
        """Bytes of all leases that it knows."""
        assert self.engine.neighbours is not None
        return sum(self.engine.neighbours.agent.membership.lease_bytes().values())

    def wake(self) -> None:
        """Let its agent send now, not at the next beat.

        An idle engine's boundary is a few quick system calls, each of which releases the interpreter's lock and takes
        it back before the threads of the agent and of the coordinator wake up: without a pause they starve.
        """
        assert self.engine.neighbours is not None
        self.engine.neighbours.agent.membership.on_change()
        time.sleep(_PAUSE_S)

    def check(self) -> None:
        """The loop is consistent, and neighbours have at most the bytes of the device that its owner lent."""
        self.engine.loop.check_integrity()
        pool = self.pool
        owned, foreign = pool.own_bytes, pool.foreign_bytes
        assert self.num_blocks >= pool.least_blocks
        assert owned + foreign <= pool.full_bytes
        self.most_lent_bytes = max(self.most_lent_bytes, foreign)


class Neighbour:
    """A process with a device that it does not use: it lends as much as the test sets."""

    def __init__(self, url: str, num_pages: int, deadline_s: float) -> None:
        self.name, self._num_pages = f"peer-test-{os.getpid()}", num_pages
        self.device: HostDevice = open_device(self.name, num_pages * PAGE_BYTES)
        lent = LentDevice(
            capacity_bytes=num_pages * PAGE_BYTES, foreign_bytes=lambda: self.taken_pages * PAGE_BYTES,
            deadline_s=deadline_s,
        )  # fmt: skip
        self.agent = LeaseAgent(CoordinatorClient(url), self.name, lent)
        self.agent.start()
        self.agent.membership.claim(0, 0)

    @property
    def taken_pages(self) -> int:
        return self._num_pages - self.device.num_free_pages()

    def lend(self, num_pages: int) -> None:
        self.agent.membership.lend(num_pages * PAGE_BYTES)

    def close(self) -> None:
        self.agent.close()
        self.device.close()
