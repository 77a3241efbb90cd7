"""Engines that lend and borrow by the rules, and the devices whose bytes they really take.

The rules are those of ``Membership``; the test carries messages. Bytes taken are recorded independently of messages:
an allocation, or the growth of an owner's pool, for which there is no room fails the test. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random

from floodplain.leases.messages import Message
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import Lease, LeaseId
from floodplain.lending.membership import LentDevice, Membership

CAPACITY = 16


class Devices:
    """Bytes of each device: its owner's, and those that others have taken under a lease."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._own: dict[str, int] = {}
        self._taken: dict[LeaseId, Lease] = {}
        self._consumers: dict[LeaseId, str] = {}
        self.num_taken = 0

    def foreign_bytes(self, device: str) -> int:
        """Return the bytes of the device that others hold."""
        with self._lock:
            return sum(lease.num_bytes for lease in self._taken.values() if lease.producer == device)

    def set_own(self, device: str, num_bytes: int) -> None:
        """Set the size of the owner's pool."""
        with self._lock:
            self._own[device] = num_bytes
            self._check(device)

    def take(self, lease: Lease) -> None:
        """Take the bytes of a granted lease."""
        with self._lock:
            assert lease.lease_id not in self._consumers, f"{lease.lease_id} is allocated twice"
            self._consumers[lease.lease_id] = lease.consumer
            self._taken[lease.lease_id] = lease
            self.num_taken += 1
            self._check(lease.producer)

    def free(self, lease_id: LeaseId) -> None:
        """Release the bytes of a lease."""
        with self._lock:
            del self._taken[lease_id]

    def _check(self, device: str) -> None:
        used = self._own.get(device, 0) + self.foreign_bytes(device)
        assert used <= CAPACITY, f"{used} of {CAPACITY} bytes of {device} are taken"


class Engine:
    """One process, seen from inside: ``exchange`` is one beat of it.

    Args:
        name: Of its device.
        lends: Whether it has a device to lend; else it borrows.
        devices: Devices whose bytes it takes.
        random: Chooses its goals, and which grants it refuses.
        clock: Its own clock.
    """

    def __init__(
        self, name: str, lends: bool, devices: Devices, random: Random, clock: Callable[[], float], ttl_s: float
    ) -> None:
        self.name, self._lends, self._devices, self._random, self._ttl_s = name, lends, devices, random, ttl_s
        device = LentDevice(capacity_bytes=CAPACITY, foreign_bytes=lambda: devices.foreign_bytes(name), deadline_s=1.0)
        instance = f"{name}-{random.getrandbits(64):016x}"
        self._member = Membership(name, instance, device if lends else None, clock)
        self._taken: set[LeaseId] = set()
        self._own_bytes = self.goal_bytes = 0

    def exchange(self, send: Callable[[Sequence[Message]], Sequence[Reply] | None], wants: int | None = None) -> bool:
        """Send due messages, learn from the replies and act on them; return whether there were replies.

        Args:
            send: Carries messages; None if no coordinator replied.
            wants: Bytes to lend from now on; None leaves that to chance.
        """
        if wants is not None:
            self.goal_bytes = wants
        elif self._random.random() < 0.2:
            self.goal_bytes = self._random.randint(0, CAPACITY)
        if self._lends:
            self._lend()
        elif not self._member.pending() and self._random.random() < 0.7:
            size = self._random.randint(1, CAPACITY // 2)
            self._member.ask([Shard(size)] * self._random.randint(1, 2))
        messages, sent_s = self._member.collect()
        replies = send(messages)
        if replies is not None:
            self._member.learn(messages, replies, self._ttl_s, sent_s)
        self._free()
        self._allocate()
        return replies is not None

    def leave(self) -> list[Message]:
        """Free all bytes, and return the last messages."""
        for lease_id in list(self._taken):
            self._give_back(lease_id)
        return self._member.farewell()

    def _lend(self) -> None:
        """Shrink the pool by the bytes to lend, and grow it by bytes that are not promised."""
        self._member.lend(self.goal_bytes)
        most_bytes = CAPACITY - self.goal_bytes
        self._own_bytes = self._member.claim(most_bytes, min(self._own_bytes, most_bytes))
        self._devices.set_own(self.name, self._own_bytes)

    def _allocate(self) -> None:
        for lease in self._member.to_allocate():
            if self._random.random() < 0.1:
                self._member.refused(lease.lease_id, "no range is free")
            else:
                self._devices.take(lease)
                self._taken.add(lease.lease_id)
                self._member.allocated(lease.lease_id)

    def _free(self) -> None:
        due = self._member.to_free()
        for lease_id in list(self._taken):
            if lease_id in due or self._random.random() < 0.2:
                self._give_back(lease_id)

    def _give_back(self, lease_id: LeaseId) -> None:
        self._devices.free(lease_id)
        self._taken.remove(lease_id)
        self._member.freed(lease_id)
