"""Leases of an ended lender are settled a TTL after consumers' reports; bytes that may be held stay owed."""

from __future__ import annotations

import pytest

from floodplain.leases.book import LeaseBook
from floodplain.leases.limits import LeaseLimits
from floodplain.leases.messages import Heartbeat, Join, Leave, Report
from floodplain.leases.states import Lease, LeaseEvent, LeaseState, Outcome, Stamp
from tests.support.lease_desk import TTL_S, Desk


class LongDesk(Desk):
    """A desk with a clock; members that send no messages are taken for dead."""

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
    desk = LongDesk()
    held, [granted] = desk.hold(1, 2), desk.grant(2, 3)
    desk.wait(TTL_S + 1.1, "c")
    assert not desk.row("p").instance and desk.row("p").offered_bytes == 5
    desk.report(held, LeaseEvent.RELEASE)
    desk.report(granted, LeaseEvent.REFUSE)
    desk.wait(0.9 * TTL_S, "c")
    assert desk.states == [LeaseState.RELEASED, LeaseState.REFUSED], "a driver may not have taken them back yet"
    desk.wait(0.3 * TTL_S, "c")
    assert desk.states == [] and desk.row("p").offered_bytes == 0
    desk.wait(100.0, "c")
    assert set(desk.book.rows.members) == {"c"}


def test_leases_released_before_the_lender_expired_are_settled_too() -> None:
    desk = LongDesk()
    desk.report(desk.hold(1, 2), LeaseEvent.RELEASE)
    desk.wait(TTL_S, "c")
    assert desk.states == [LeaseState.RELEASED]
    desk.wait(1.3 * TTL_S, "c")
    assert desk.states == []


def test_a_live_lender_settles_leases_itself() -> None:
    desk = LongDesk()
    desk.report(desk.hold(1, 2), LeaseEvent.RELEASE)
    desk.wait(5 * TTL_S, "c", "p")
    assert desk.states == [LeaseState.RELEASED]


def test_the_next_lender_of_the_name_settles_what_was_not_settled_yet() -> None:
    desk = LongDesk()
    lease = desk.hold(1, 2)
    desk.wait(TTL_S + 1.1, "c")
    desk.report(lease, LeaseEvent.RELEASE)
    assert desk.say(Join("p", "p-2")).outcome is Outcome.APPLIED
    desk.wait(5 * TTL_S, "c", "p")
    assert desk.states == [LeaseState.RELEASED]
    assert [settled.state for settled in desk.observe(0).leases] == [LeaseState.SETTLED]


@pytest.mark.parametrize("is_killed", [True, False])
def test_an_expired_lease_waits_for_its_own_consumers_word(is_killed: bool) -> None:
    desk = LongDesk()
    lease = desk.hold(1, 2)
    desk.say(Leave("p", 1))
    desk.wait(TTL_S + 1.1)
    assert desk.states == [LeaseState.EXPIRED]
    if not is_killed:
        desk.say(Join("c", "c-1"))
        known = desk.book.rows.leases[lease.lease_id]
        word = Report("c", lease.lease_id, Stamp(1, known.revision), LeaseEvent.RELEASE)
        assert desk.say(word).outcome is Outcome.APPLIED
    desk.wait(2 * TTL_S, "c")
    assert desk.states == ([LeaseState.EXPIRED] if is_killed else [])


def test_as_much_stays_owed_as_ended_leases_may_hold() -> None:
    """The first consumer is stopped and holds its bytes. The second has freed as many, without a report yet."""
    desk = LongDesk()
    desk.say(Join("d", "d-1"))
    stopped = desk.hold(1, 2)
    desk.wait(TTL_S + 1.1, "d", "p")
    assert desk.book.rows.leases[stopped.lease_id].state is LeaseState.EXPIRED
    desk.say(Join("c", "c-2"))
    freed, other = desk.hold(2, 2), desk.hold(3, 4)
    assert [settled.lease_id for settled in desk.observe(6).leases] == [stopped.lease_id]
    assert desk.row("p").hidden_bytes == 2
    desk.wait(TTL_S + 1.1, "c")
    desk.report(freed, LeaseEvent.RELEASE)
    desk.wait(2 * TTL_S, "c")
    assert desk.states == [LeaseState.RELEASED, LeaseState.HELD], "the stopped consumer's bytes would have no lease"
    desk.report(other, LeaseEvent.RELEASE)
    desk.wait(2 * TTL_S, "c")
    assert desk.states == [LeaseState.RELEASED] and desk.book.rows.leased_bytes("p") >= 2


def test_ended_leases_hold_no_more_than_a_look_sees_nor_than_is_leased() -> None:
    desk = LongDesk()
    desk.say(Join("d", "d-1"))
    desk.hold(1, 6)
    desk.wait(TTL_S + 1.1, "d", "p")
    desk.say(Join("c", "c-2"))
    kept, _ = desk.hold(2, 2), desk.hold(3, 2)
    desk.observe(4)
    assert desk.row("p").hidden_bytes == 4, "others hold no more"
    desk.report(kept, LeaseEvent.RELEASE)
    desk.observe(2)
    assert desk.row("p").hidden_bytes == 2
    assert desk.book.forget("p").outcome is Outcome.APPLIED
    assert desk.row("p").hidden_bytes == 0, "the device is gone"


def test_a_restart_begins_to_wait_anew() -> None:
    desk = LongDesk()
    lease = desk.hold(1, 2)
    desk.wait(TTL_S + 1.1, "c")
    desk.report(lease, LeaseEvent.RELEASE)
    desk.wait(0.9 * TTL_S, "c")
    rows = desk.book.rows
    desk.book = LeaseBook(TTL_S, desk.now, rows.members.values(), rows.leases.values())
    desk.wait(0.9 * TTL_S, "c")
    assert desk.states == [LeaseState.RELEASED]
    desk.wait(0.3 * TTL_S, "c")
    assert desk.states == []
