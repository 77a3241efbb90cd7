"""Engines that lend and borrow by the rules, and the devices whose bytes they really take.

The rules are those of ``core/leases``; the test carries messages. Bytes taken are recorded independently of messages:
an allocation, or the growth of an owner's pool, for which there is no room fails the test. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random

from floodplain.leases.member import Borrower, Lender, MemberSide
from floodplain.leases.messages import Leave, Message
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import Lease, LeaseId

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
        self.name, self._lends, self._devices, self._random, self._clock = name, lends, devices, random, clock
        self.side = MemberSide(name, f"{name}-{random.getrandbits(64):016x}", ttl_s)
        self.lender, self.borrower = Lender(self.side, CAPACITY, deadline_s=1.0), Borrower(self.side)
        self._own_bytes = 0
        self.goal_bytes = 0

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
        messages = self._say()
        sent_s = self._clock()
        replies = send(messages)
        if replies is not None:
            for message, reply in zip(messages, replies, strict=True):
                self.side.learn(message, reply, sent_s, self._clock())
        if not self._lends:
            self._free()
            self._allocate()
        return replies is not None

    def leave(self) -> Leave:
        """Free all bytes, and return the last message."""
        for lease_id in self.borrower.allocated_ids:
            self._give_back(lease_id)
        return Leave(self.name, self.side.stamp.generation)

    def _say(self) -> list[Message]:
        messages: list[Message] = [self.side.greeting()]
        if self._lends:
            message = self._lend()
            return messages if message is None else [*messages, message]
        if not self.side.open_requests and self._random.random() < 0.7:
            size = self._random.randint(1, CAPACITY // 2)
            self.borrower.ask([Shard(size)] * self._random.randint(1, 2))
        return [*messages, *self.borrower.say()]

    def _lend(self) -> Message | None:
        """Shrink the pool by the bytes to lend, and grow it by bytes that are not promised."""
        self.lender.target_bytes = self.goal_bytes
        own = min(self._own_bytes, CAPACITY - self.goal_bytes)
        self._own_bytes = max(own, min(CAPACITY - self.lender.promised_bytes, CAPACITY - self.goal_bytes))
        self._devices.set_own(self.name, self._own_bytes)
        return self.lender.say(self._own_bytes, self._devices.foreign_bytes(self.name))

    def _allocate(self) -> None:
        for lease in self.borrower.to_allocate(self._clock()):
            if self._random.random() < 0.1:
                self.borrower.refused(lease.lease_id, "no range is free")
            else:
                self._devices.take(lease)
                self.borrower.allocated(lease.lease_id, self._clock())

    def _free(self) -> None:
        gone = set(self.borrower.to_free())
        for lease_id in self.borrower.allocated_ids:
            if lease_id in gone or self._random.random() < 0.2:
                self._give_back(lease_id)

    def _give_back(self, lease_id: LeaseId) -> None:
        self._devices.free(lease_id)
        self.borrower.freed(lease_id)
