"""A consumer and a producer in one process with their coordinator, without a network: the test sends beats.

The producer owns pages of a real host device, shrinks by what it lends and grows by what it gets back.
"""

from __future__ import annotations

from pathlib import Path

from floodplain.leases.book import LeaseBook
from floodplain.leases.states import LeaseId
from floodplain.lending.membership import LentDevice, Membership
from floodplain.memory.arena import Page
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support.host_devices import open_device

TTL_S = 10.0
DEADLINE_S = 2.0


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0


class Coordinator:
    """A book that replies at once."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.book = LeaseBook(TTL_S, clock.now)

    def exchange(self, member: Membership) -> None:
        """Exchange messages with a member until an answer brings no news; no two are sent at one time."""
        is_new = True
        while is_new:
            self.clock.now += 1e-3
            messages, now = member.collect()
            replies = self.book.handle_all(messages, now)
            self.book.rows.check_integrity()
            is_new = member.learn(messages, replies, TTL_S, now)

    def pass_time(self, seconds: float) -> list[str]:
        """Advance the clock; return the members that are now dead, after a TTL of silence."""
        self.clock.now += seconds
        return self.book.tick(self.clock.now)


class InProcessClient(Membership):
    """A consumer without an agent: the test says when it exchanges messages."""

    def __init__(self, coordinator: Coordinator, name: str = "consumer") -> None:
        super().__init__(name, f"{name}-1", clock=lambda: coordinator.clock.now)
        self.coordinator = coordinator
        self.refusals: list[str] = []

    def beat(self) -> None:
        """Exchange messages with the coordinator."""
        self.coordinator.exchange(self)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        self.refusals.append(reason)
        super().refused(lease_id, reason)


class Producer:
    """An engine whose pool takes all of its device except lent pages."""

    def __init__(self, coordinator: Coordinator, name: str, num_pages: int, directory: Path) -> None:
        self.coordinator, self.name, self.num_pages = coordinator, name, num_pages
        self.device = open_device(name, num_pages * PAGE_BYTES, directory)
        lent = LentDevice(
            capacity_bytes=num_pages * PAGE_BYTES,
            foreign_bytes=lambda: self.num_foreign_pages * PAGE_BYTES,
            deadline_s=DEADLINE_S,
        )
        self._member = Membership(name, f"{name}-1", lent, lambda: coordinator.clock.now)
        self._num_own = num_pages
        self.pages: list[Page] = []
        self.was_refused = False

    @property
    def num_foreign_pages(self) -> int:
        """Pages of the device that others hold, as it sees them."""
        return self.num_pages - self.device.num_free_pages() - len(self.pages)

    def lend(self, num_pages: int) -> None:
        """Set the pages to lend from now on."""
        self._num_own = self.num_pages - num_pages
        self._member.lend(num_pages * PAGE_BYTES)

    def beat(self) -> None:
        """Resize the pool, exchange messages with the coordinator, and follow its replies."""
        self.was_refused = False
        self._resize()
        self.coordinator.exchange(self._member)
        self._resize()

    def _resize(self) -> None:
        self.device.release(self.pages[self._num_own :])
        del self.pages[self._num_own :]
        num_own = self._member.claim(self._num_own * PAGE_BYTES, len(self.pages) * PAGE_BYTES) // PAGE_BYTES
        if num_own > len(self.pages):
            fresh = self.device.allocate(num_own - len(self.pages))
            self.was_refused |= fresh is None
            self.pages += fresh or []
