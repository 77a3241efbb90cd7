"""Devices that end with the last process of their name: nothing stays owed to them, and the sums stay right."""

from __future__ import annotations

from collections import Counter

from hypothesis import find, given, settings
from hypothesis import strategies as st

from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Join, Leave, Observe, Offer, Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseState, Stamp

TTL_S = 10.0
PRODUCERS, CONSUMERS = ("p0", "p1"), ("c0", "c1")
STEPS = st.lists(st.tuples(st.sampled_from(range(9)), st.integers(0, 7)), max_size=60)


class Town:
    """A book, and members that send allowed messages, each with its current rows."""

    def __init__(self) -> None:
        self.book, self.now, self.seen = LeaseBook(TTL_S, 0.0), 0.0, Counter[str]()
        self._lives = 0
        for name in (*PRODUCERS, *CONSUMERS):
            self._join(name)
        for what, number in ((0, 6), (0, 7), (1, 0), (1, 3)):  # offers, and a lease of each device
            self.step(what, number)

    @property
    def leases(self) -> list[Lease]:
        return sorted(self.book.rows.leases.values(), key=lambda lease: lease.lease_id)

    def step(self, what: int, number: int) -> None:
        """One event; ``number`` selects the members."""
        producer, consumer = PRODUCERS[number % 2], CONSUMERS[number // 2 % 2]
        match what:
            case 0:
                row = self.book.rows.members[producer]
                self.book.handle(Offer(producer, row.stamp, 4 + number), self.now)
            case 1 | 2:
                row = self.book.rows.members[consumer]
                shards = (Shard(1 + number % 3, producer),)
                self.book.handle(Request(consumer, row.generation, row.last_request + 1, shards), self.now)
            case 3 | 4:
                self._report(number, LeaseEvent.HOLD if what == 3 else LeaseEvent.RELEASE)
            case 5:
                row = self.book.rows.members[producer]
                self.book.handle(Observe(producer, row.stamp, 0), self.now)
            case 6:
                name = (*PRODUCERS, *CONSUMERS)[number % 4]
                self.book.handle(Leave(name, self.book.rows.members[name].generation, is_last=number < 4), self.now)
            case 7:
                self._join((*PRODUCERS, *CONSUMERS)[number % 4])
            case 8:
                self.book = LeaseBook(TTL_S, self.now, self.book.rows.members.values(), self.leases)
        self.check()

    def end(self) -> None:
        """All consumers end."""
        for name in CONSUMERS:
            self.book.handle(Leave(name, self.book.rows.members[name].generation), self.now)
        self.check()
        left = [lease for lease in self.leases if self.book.rows.members[lease.producer].is_gone]
        assert not left, "a device that is gone lends for ever"

    def check(self) -> None:
        self.book.rows.check_integrity()
        assert self.book.roster.heard <= set(self.book.roster.living), "an ended member still offers"
        for lease in self.leases:
            is_gone = self.book.rows.members[lease.producer].is_gone
            assert not (lease.is_owed and is_gone), "no lender will ever look there"
            self.seen["lent by one that is gone"] += is_gone
            self.seen["owed"] += lease.is_owed
        for row in self.book.rows.members.values():
            if row.is_gone:
                assert row.offered_bytes == self.book.rows.leased_bytes(row.name)

    def _join(self, name: str) -> None:
        self._lives += 1
        self.book.handle(Join(name, f"life {self._lives}"), self.now)

    def _report(self, number: int, event: LeaseEvent) -> None:
        mine = [lease for lease in self.leases if lease.state in (LeaseState.GRANTED, LeaseState.HELD)]
        if mine:
            lease = mine[number % len(mine)]
            stamp = Stamp(lease.generation, lease.revision)
            self.book.handle(Report(lease.consumer, lease.lease_id, stamp, event), self.now)


def drive(steps: list[tuple[int, int]]) -> Town:
    town = Town()
    for what, number in steps:
        town.step(what, number)
    town.end()
    return town


@given(steps=STEPS)
@settings(max_examples=400)
def test_nothing_is_owed_to_a_device_that_is_gone(steps: list[tuple[int, int]]) -> None:
    drive(steps)


def test_consumers_are_seen_to_hold_memory_of_devices_that_are_gone() -> None:
    """Control: some run has memory lent by a device that is gone; some run has memory owed to one that may return."""
    for wanted in ("lent by one that is gone", "owed"):
        find(STEPS, lambda steps, wanted=wanted: drive(steps).seen[wanted] > 0)
