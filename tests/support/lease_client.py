"""A consumer and a producer in one process with their coordinator, without a network: the test sends beats.

The producer owns pages of a real host device, shrinks by what it lends and grows by what it gets back.
"""

from __future__ import annotations

from pathlib import Path

from floodplain.leases.book import LeaseBook
from floodplain.leases.member import Lender, MemberSide
from floodplain.leases.messages import Message
from floodplain.leases.states import LeaseId
from floodplain.lending.membership import Membership
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

    def tell(self, side: MemberSide, message: Message) -> None:
        """Handle a message and learn its reply; no two messages are sent at one time."""
        self.clock.now += 1e-3
        reply = self.book.handle(message, self.clock.now)
        self.book.rows.check_integrity()
        side.learn(message, reply, self.clock.now, self.clock.now)

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
        """Exchange messages with the coordinator until an answer brings no news."""
        is_new = True
        while is_new:
            self.coordinator.clock.now += 1e-3
            messages, now = self.collect()
            replies = self.coordinator.book.handle_all(messages, now)
            self.coordinator.book.rows.check_integrity()
            is_new = self.learn(messages, replies, TTL_S, now)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        self.refusals.append(reason)
        super().refused(lease_id, reason)


class Producer:
    """An engine whose pool takes all of its device except lent pages."""

    def __init__(self, coordinator: Coordinator, name: str, num_pages: int, directory: Path) -> None:
        self.coordinator = coordinator
        self.side = MemberSide(name, f"{name}-1", TTL_S)
        self.lender = Lender(self.side, num_pages * PAGE_BYTES, DEADLINE_S)
        self.num_pages = num_pages
        self.device = open_device(name, num_pages * PAGE_BYTES, directory)
        self.pages: list[Page] = []
        self.was_refused = False

    @property
    def num_foreign_pages(self) -> int:
        """Pages of the device that others hold, as it sees them."""
        return self.num_pages - self.device.num_free_pages() - len(self.pages)

    def lend(self, num_pages: int) -> None:
        """Set the pages to lend from now on."""
        self.lender.target_bytes = num_pages * PAGE_BYTES

    def beat(self) -> None:
        """Resize the pool, exchange messages with the coordinator, and follow its replies."""
        self.was_refused = False
        self._resize()
        self.coordinator.tell(self.side, self.side.greeting())
        for _ in range(3):  # recall, observe, offer
            message = self.lender.say(len(self.pages) * PAGE_BYTES, self.num_foreign_pages * PAGE_BYTES)
            if message is not None:
                self.coordinator.tell(self.side, message)
        self._resize()

    def _resize(self) -> None:
        lent = self.lender.target_bytes // PAGE_BYTES
        room = self.num_pages - max(lent, self.lender.promised_bytes // PAGE_BYTES)
        self.device.release(self.pages[self.num_pages - lent :])
        del self.pages[self.num_pages - lent :]
        if room > len(self.pages):
            fresh = self.device.allocate(room - len(self.pages))
            self.was_refused |= fresh is None
            self.pages += fresh or []
