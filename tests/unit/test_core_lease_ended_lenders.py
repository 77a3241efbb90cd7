"""Leases of an ended lender are settled a TTL after consumers' reports; bytes that may be held stay owed."""

from __future__ import annotations

import pytest

from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Heartbeat, Join, Leave, Report
from floodplain.leases.rules import LeaseLimits
from floodplain.leases.states import Lease, LeaseEvent, LeaseState, Outcome, Stamp
from tests.support.lease_pair import TTL_S, LeasePair


class LongLivedPair(LeasePair):
    """A pair with a clock; members that send no messages are taken for dead."""

    def __init__(self) -> None:
        super().__init__(LeaseLimits(forget_after_s=100.0))

    def hold(self, number: int, size: int) -> Lease:
        [lease] = self.grant(number, size)
        self.report(lease, LeaseEvent.HOLD)
        return lease

    def wait(self, seconds: float, *living: str) -> None:
        """Let seconds pass, in which ``living`` send heartbeats."""
        for _ in range(10):
            self.now += seconds / 10
            for name in living:
                self.say(Heartbeat(name, self.row(name).generation))
            self.book.tick(self.now)
            self.book.rows.check_integrity()

    @property
    def states(self) -> list[LeaseState]:
        return [lease.state for lease in self.book.rows.leases.values()]


def test_leases_of_a_killed_lender_are_settled_after_its_consumers_release() -> None:
    pair = LongLivedPair()
    held, [granted] = pair.hold(1, 2), pair.grant(2, 3)
    pair.wait(TTL_S + 1.1, "c")
    assert not pair.row("p").instance and pair.row("p").offered_bytes == 5
    pair.report(held, LeaseEvent.RELEASE)
    pair.report(granted, LeaseEvent.REFUSE)
    pair.wait(0.9 * TTL_S, "c")
    assert pair.states == [LeaseState.RELEASED, LeaseState.REFUSED], "a driver may not have taken them back yet"
    pair.wait(0.3 * TTL_S, "c")
    assert pair.states == [] and pair.row("p").offered_bytes == 0
    pair.wait(100.0, "c")
    assert set(pair.book.rows.members) == {"c"}


def test_leases_released_before_the_lender_expired_are_settled_too() -> None:
    pair = LongLivedPair()
    pair.report(pair.hold(1, 2), LeaseEvent.RELEASE)
    pair.wait(TTL_S, "c")
    assert pair.states == [LeaseState.RELEASED]
    pair.wait(1.3 * TTL_S, "c")
    assert pair.states == []


def test_the_next_lender_of_the_name_settles_what_was_not_settled_yet() -> None:
    pair = LongLivedPair()
    lease = pair.hold(1, 2)
    pair.wait(TTL_S + 1.1, "c")
    pair.report(lease, LeaseEvent.RELEASE)
    assert pair.say(Join("p", "p-2")).outcome is Outcome.APPLIED
    pair.wait(5 * TTL_S, "c", "p")
    assert pair.states == [LeaseState.RELEASED]
    assert [settled.state for settled in pair.observe(0).leases] == [LeaseState.SETTLED]


@pytest.mark.parametrize("is_killed", [True, False])
def test_an_expired_lease_waits_for_its_own_consumers_word(is_killed: bool) -> None:
    pair = LongLivedPair()
    lease = pair.hold(1, 2)
    pair.say(Leave("p", 1))
    pair.wait(TTL_S + 1.1)
    assert pair.states == [LeaseState.EXPIRED]
    if not is_killed:
        pair.say(Join("c", "c-1"))
        known = pair.book.rows.leases[lease.lease_id]
        word = Report("c", lease.lease_id, Stamp(1, known.revision), LeaseEvent.RELEASE)
        assert pair.say(word).outcome is Outcome.APPLIED
    pair.wait(2 * TTL_S, "c")
    assert pair.states == ([LeaseState.EXPIRED] if is_killed else [])


def test_ended_leases_hold_no_more_than_a_look_sees_nor_than_is_leased() -> None:
    pair = LongLivedPair()
    pair.say(Join("d", "d-1"))
    pair.hold(1, 6)
    pair.wait(TTL_S + 1.1, "d", "p")
    pair.say(Join("c", "c-2"))
    kept, _ = pair.hold(2, 2), pair.hold(3, 2)
    pair.observe(4)
    assert pair.row("p").hidden_bytes == 4, "others hold no more"
    pair.report(kept, LeaseEvent.RELEASE)
    pair.observe(2)
    assert pair.row("p").hidden_bytes == 2
    assert pair.book.forget("p").outcome is Outcome.APPLIED
    assert pair.row("p").hidden_bytes == 0, "the device is gone"


def test_a_restart_begins_to_wait_anew() -> None:
    pair = LongLivedPair()
    lease = pair.hold(1, 2)
    pair.wait(TTL_S + 1.1, "c")
    pair.report(lease, LeaseEvent.RELEASE)
    pair.wait(0.9 * TTL_S, "c")
    rows = pair.book.rows
    pair.book = LeaseBook(TTL_S, pair.now, rows.members.values(), rows.leases.values())
    pair.wait(0.9 * TTL_S, "c")
    assert pair.states == [LeaseState.RELEASED]
    pair.wait(0.3 * TTL_S, "c")
    assert pair.states == []
