"""A lease client and a producer in one process with their coordinator, without a network: the test sends beats.

The client is a ``Borrower`` that sends to a ``LeaseBook`` when ``beat`` is called. The producer owns pages of a real
host device, shrinks by what it lends and grows by what it gets back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from floodplain.leases.book import LeaseBook
from floodplain.leases.member import Borrower, Lender, MemberSide
from floodplain.leases.messages import Message
from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseId, LeaseState
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


class InProcessClient:
    """See ``LeaseClient``."""

    def __init__(self, coordinator: Coordinator, name: str = "consumer") -> None:
        self.coordinator = coordinator
        self.side = MemberSide(name, f"{name}-1", TTL_S)
        self.borrower = Borrower(self.side)
        self.refusals: list[str] = []
        self._unanswered: set[LeaseId] = set()
        self._cancelled: set[int] = set()

    def beat(self) -> None:
        """Exchange messages with the coordinator, as an agent's thread does every second."""
        self.coordinator.tell(self.side, self.side.greeting())
        for lease in self._grants():
            if lease.request in self._cancelled:
                self.borrower.refused(lease.lease_id, "not wanted any more")
        if not self._unanswered:
            for message in self.borrower.say():
                self.coordinator.tell(self.side, message)

    def ask(self, shards: Sequence[Shard]) -> int:
        return self.borrower.ask(shards)

    def cancel(self, number: int) -> None:
        self.borrower.cancel(number)
        self._cancelled.add(number)

    def pending(self) -> Collection[int]:
        return {*self.side.open_requests, *(lease.request for lease in self._grants())} - self._cancelled

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        leases = self.borrower.to_allocate(self.coordinator.clock.now)
        leases = [lease for lease in leases if lease.request not in {*self._cancelled, *others}]
        self._unanswered |= {lease.lease_id for lease in leases}
        return leases

    def allocated(self, lease_id: LeaseId) -> None:
        self._unanswered.remove(lease_id)
        self.borrower.allocated(lease_id, self.coordinator.clock.now)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        self._unanswered.remove(lease_id)
        self.refusals.append(reason)
        self.borrower.refused(lease_id, reason)

    def to_free(self) -> Mapping[LeaseId, float]:
        return {lease_id: due_s - self.coordinator.clock.now for lease_id, due_s in self.borrower.to_free().items()}

    def freed(self, lease_id: LeaseId) -> None:
        self.borrower.freed(lease_id)

    def _grants(self) -> list[Lease]:
        """Return unanswered grants of this life, whether or not they may be allocated now."""
        return [
            lease
            for lease in self.side.borrowed()
            if lease.state is LeaseState.GRANTED
            and lease.generation == self.side.stamp.generation
            and lease.lease_id not in self.borrower._done
        ]


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
