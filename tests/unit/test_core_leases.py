"""Leases and the book: the table of transitions, stale messages, grants, settling by observations, ended lenders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from floodplain.core.errors import InvariantError
from floodplain.leases.book import LeaseBook
from floodplain.leases.choice import choose_producers, choose_recalls
from floodplain.leases.member import Borrower, MemberSide
from floodplain.leases.messages import Heartbeat, Join, Leave, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.rules import LeaseLimits
from floodplain.leases.states import (
    ENDED,
    OWED,
    TRANSITIONS,
    Lease,
    LeaseEvent,
    LeaseId,
    LeaseState,
    Outcome,
    Stamp,
    judge,
    judge_copy,
)
from tests.support.lease_pair import TTL_S, LeasePair

DESIGN = Path(__file__).parents[2] / "docs" / "design" / "005-leases.md"


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_lease_can_end_and_none_comes_back() -> None:
    reachable = {state: {state} for state in LeaseState}
    for _ in LeaseState:
        for state, row in TRANSITIONS.items():
            for after in row.values():
                reachable[state] |= reachable[after]
    assert all(states & ENDED for states in reachable.values())
    assert all(LeaseState.GRANTED not in reachable[after] for row in TRANSITIONS.values() for after in row.values())


def test_what_was_lent_returns_by_a_look_only() -> None:
    for state, row in TRANSITIONS.items():
        for event, after in row.items():
            assert (after is LeaseState.SETTLED) == (event is LeaseEvent.SETTLE)
            assert after is not LeaseState.SETTLED or state in OWED


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize("event", LeaseEvent)
def test_a_lease_changes_by_the_table_or_raises(state: LeaseState, event: LeaseEvent) -> None:
    lease = Lease(LeaseId("c.1.1.0"), 1, "p", "c", 8, generation=1, state=state, revision=3)
    if event not in TRANSITIONS[state]:
        assert not lease.allows(event)
        with pytest.raises(InvariantError, match="cannot happen"):
            lease.after(event)
        return
    after = lease.after(event, deadline_s=2.0, reason="why")
    assert (after.state, after.revision) == (TRANSITIONS[state][event], 4)
    assert after.held_bytes == (8 if event is LeaseEvent.HOLD else 0)
    assert after.deadline_s == (2.0 if event is LeaseEvent.RECALL else None)


def test_the_design_shows_this_table() -> None:
    lines = ["stateDiagram-v2", "    [*] --> granted"]
    for state, row in TRANSITIONS.items():
        lines += [f"    {state.value} --> {after.value}: {event.value}" for event, after in row.items()]
        lines += [f"    {state.value} --> [*]"] if not row else []
    assert "\n".join(lines) in DESIGN.read_text()


# -- stale messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stamp", "outcome"),
    [
        (Stamp(2, 5), Outcome.APPLIED),
        (Stamp(2, 4), Outcome.STALE),
        (Stamp(1, 9), Outcome.STALE),
        (Stamp(2, 6), Outcome.DEFERRED),
        (Stamp(3, 1), Outcome.DEFERRED),
    ],
)
def test_a_message_changes_only_the_row_that_its_sender_has_seen(stamp: Stamp, outcome: Outcome) -> None:
    assert judge(stamp, Stamp(2, 5)) is outcome


def test_a_copy_replaces_an_older_one_and_two_authors_are_seen() -> None:
    old = Lease(LeaseId("c.1.1.0"), 1, "p", "c", 8, generation=1)
    held, recalled = old.after(LeaseEvent.HOLD), old.after(LeaseEvent.RECALL)
    assert judge_copy(held, old) is Outcome.APPLIED
    assert judge_copy(old, held) is Outcome.STALE
    assert judge_copy(held, held) is Outcome.STALE
    assert judge_copy(held, recalled) is Outcome.CONFLICT


# -- grants ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "chosen"),
    [
        ([Shard(4)], ["b"]),
        ([Shard(4, "a")], ["a"]),
        ([Shard(6), Shard(4)], ["b", "a"]),
        ([Shard(4), Shard(5, "b")], ["a", "b"]),
        ([Shard(8)], None),
        ([Shard(1), Shard(1, "unknown")], None),
        ([Shard(4), Shard(4), Shard(4)], None),
    ],
)
def test_all_shards_find_a_device_or_none_does(shards: list[Shard], chosen: list[str] | None) -> None:
    assert choose_producers(shards, {"a": 5, "b": 7}) == chosen


def test_a_recall_takes_what_costs_least() -> None:
    def lease(name: str, num_bytes: int, state: LeaseState) -> Lease:
        held = num_bytes if state is LeaseState.HELD else 0
        return Lease(LeaseId(name), 1, "p", "c", num_bytes, 1, state=state, held_bytes=held)

    leases = [
        lease("large", 9, LeaseState.HELD),
        lease("small", 3, LeaseState.HELD),
        lease("new", 2, LeaseState.GRANTED),
        lease("owed", 9, LeaseState.EXPIRED),
    ]

    def names(num_bytes: int) -> list[str]:
        return [lease.lease_id for lease in choose_recalls(leases, num_bytes)]

    assert names(0) == []
    assert names(2) == ["new"]
    assert names(5) == ["new", "small"]
    assert names(6) == ["new", "large"]
    assert names(99) == ["new", "large", "small"]


# -- the book ----------------------------------------------------------------------------------------------------------


def test_a_lease_from_offer_to_settlement() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    assert pair.book.rows.unleased_bytes("p") == 4
    assert pair.report(lease, LeaseEvent.HOLD).outcome is Outcome.APPLIED
    reply = pair.say(Recall("p", pair.row("p").stamp, 10, deadline_s=3.0))
    assert reply.due_in_s == {lease.lease_id: 3.0}
    assert pair.row("p").offered_bytes == 6  # unleased bytes are withdrawn at once
    assert pair.grant(2, 1) == []
    assert pair.report(lease, LeaseEvent.RELEASE).outcome is Outcome.APPLIED
    assert pair.grant(2, 1) == []  # owed
    assert pair.observe(6).leases == ()  # still there
    assert [lease.state for lease in pair.observe(0).leases] == [LeaseState.SETTLED]
    assert pair.row("p").offered_bytes == 0
    assert pair.book.rows.leases == {}


def test_a_request_is_granted_once_and_not_again_after_its_leases_ended() -> None:
    pair = LeasePair()
    request = Request("c", 1, 1, (Shard(3), Shard(3)))
    first = pair.say(request)
    assert pair.say(request).leases == first.leases
    for lease in first.leases:
        pair.report(lease, LeaseEvent.RELEASE)
    pair.observe(0)
    assert pair.say(request).outcome is Outcome.STALE
    assert pair.book.rows.leases == {}


def test_a_request_that_a_later_one_overtook_is_open_no_more() -> None:
    """Granted numbers only rise, so it can never be granted: the consumer must send a new request."""
    pair, side = LeasePair(), MemberSide("b", "b-1", TTL_S)
    borrower = Borrower(side)
    side.learn(Join("b", "b-1"), pair.say(Join("b", "b-1")), 0.0, 0.0)
    for num_bytes in (11, 3):  # more than there is, then less
        borrower.ask([Shard(num_bytes)])
    for now in (1.0, 2.0):
        assert 1 in side.open_requests
        for message in borrower.say():
            side.learn(message, pair.say(message), now, now)
    assert not side.open_requests
    assert [lease.request for lease in borrower.to_allocate(2.0)] == [2]
    late = Request("b", side.stamp.generation - 1, borrower.ask([Shard(11)]), (Shard(11),))
    side.learn(late, Reply(Outcome.STALE, replace(pair.row("b"), last_request=3)), 2.0, 2.0)
    assert 3 in side.open_requests  # an answer to an earlier life does not apply


def test_a_look_from_before_an_allocation_settles_nothing() -> None:
    pair = LeasePair()
    lease, other = pair.grant(1, 3, 3)
    pair.report(other, LeaseEvent.RELEASE)
    look = Observe("p", pair.row("p").stamp, 0)
    pair.report(lease, LeaseEvent.HOLD)
    assert pair.say(look).outcome is Outcome.STALE


def test_a_look_from_before_a_release_of_an_unreported_lease_is_stale() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    look = Observe("p", pair.row("p").stamp, 0)
    pair.report(lease, LeaseEvent.RELEASE)
    assert pair.say(look).outcome is Outcome.STALE
    assert [lease.state for lease in pair.observe(0).leases] == [LeaseState.SETTLED]


def test_a_look_from_before_an_expiry_settles_nothing() -> None:
    """The consumer allocated after the observation, its report was lost, and it stopped: it holds bytes."""
    pair = LeasePair()
    pair.grant(1, 6)
    look = Observe("p", pair.row("p").stamp, 0)
    pair.now = TTL_S
    pair.say(Heartbeat("p", 1))
    pair.now = TTL_S + 0.1
    assert pair.book.tick(pair.now) == ["c"]
    assert pair.say(look).outcome is Outcome.STALE
    assert pair.book.rows.leased_bytes("p") == 6
    assert [lease.state for lease in pair.observe(6).leases] == []


def test_silence_for_a_ttl_expires_leases_and_withdraws_offers() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    pair.now = TTL_S
    assert pair.book.tick(pair.now) == []
    pair.say(Heartbeat("p", 1))
    pair.now = TTL_S + 0.1
    assert pair.book.tick(pair.now) == ["c"]
    assert pair.book.rows.leases[lease.lease_id].state is LeaseState.EXPIRED
    assert pair.say(Heartbeat("c", 1)).outcome is Outcome.STALE
    assert pair.say(Join("c", "c-1")).member == Member("c", "c-1", generation=2, revision=pair.row("c").revision)
    assert pair.row("p").offered_bytes == 10
    pair.now += TTL_S + 0.1
    pair.book.tick(pair.now)
    assert pair.row("p").offered_bytes == 6  # owed bytes stay offered until they are seen free


def test_a_restart_renews_the_ttls_of_members_and_recall_deadlines() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    pair.say(Recall("p", pair.row("p").stamp, 10, deadline_s=3.0))
    rows = pair.book.rows
    book = LeaseBook(TTL_S, 100.0, rows.members.values(), rows.leases.values())
    assert book.tick(100.0 + TTL_S) == []
    assert [late.lease_id for late in book.overdue(103.5)] == [lease.lease_id]
    assert book.overdue(102.5) == []
    assert book.handle(Heartbeat("c", 1), 101.0).due_in_s == {lease.lease_id: 2.0}
    assert book.take_changes().leases == ()


def test_what_is_lost_with_a_device_is_lost_and_its_name_can_be_used_again() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    pair.report(lease, LeaseEvent.HOLD)
    assert pair.book.forget("unknown").outcome is Outcome.CONFLICT
    assert [lost.state for lost in pair.book.forget("p").leases] == [LeaseState.LOST]
    assert pair.say(Join("p", "p-2")).outcome is Outcome.APPLIED
    assert pair.row("p").offered_bytes == 0
    late = Report("c", lease.lease_id, Stamp(lease.generation, lease.revision), LeaseEvent.RELEASE)
    assert pair.say(late).outcome is Outcome.STALE


def test_the_next_device_of_a_name_keeps_leases_that_may_be_allocated() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    assert [kept.state for kept in pair.book.forget("p").leases] == [LeaseState.RECALLED]
    assert pair.say(Join("p", "p-2")).outcome is Outcome.APPLIED
    assert pair.row("p").offered_bytes == 6
    assert pair.say(Heartbeat("c", 1)).due_in_s == {lease.lease_id: 0.0}
    assert pair.observe(0).leases == ()  # it may have been allocated since
    pair.report(lease, LeaseEvent.RELEASE)
    assert [settled.state for settled in pair.observe(0).leases] == [LeaseState.SETTLED]
    assert pair.row("p").offered_bytes == 0


def test_a_second_forget_of_a_device_without_successor_drops_its_leases() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    pair.book.forget("p")
    pair.report(lease, LeaseEvent.RELEASE)
    assert [lost.state for lost in pair.book.forget("p").leases] == [LeaseState.LOST]
    assert pair.book.rows.leases == {}


def test_offers_below_what_is_leased_are_refused_with_what_to_do() -> None:
    pair = LeasePair()
    pair.grant(1, 6)
    reply = pair.say(Offer("p", pair.row("p").stamp, 5))
    assert reply.outcome is Outcome.CONFLICT
    assert "recall" in reply.detail
    assert pair.say(Offer("p", pair.row("p").stamp, 6)).outcome is Outcome.APPLIED


def test_consumers_borrow_from_allowed_producers_only() -> None:
    pair = LeasePair()
    pair.book.allow({"c": ["q"]}, 0.0, 5.0)
    assert pair.grant(1, 1) == []
    pair.book.allow({"c": ["q", "p"]}, 0.0, 5.0)
    assert [lease.producer for lease in pair.grant(1, 1)] == ["p"]
    pair.book.allow({}, 0.0, 5.0)
    assert pair.grant(2, 1) == []
    pair.book.allow(None, 0.0, 5.0)
    assert [lease.producer for lease in pair.grant(2, 1)] == ["p"]


def test_reports_on_anothers_lease_or_of_anothers_event_conflict() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 6)
    stamp = Stamp(lease.generation, lease.revision)
    assert pair.say(Report("p", lease.lease_id, stamp, LeaseEvent.RELEASE)).outcome is Outcome.CONFLICT
    assert pair.say(Report("c", lease.lease_id, stamp, LeaseEvent.SETTLE)).outcome is Outcome.CONFLICT
    assert pair.book.rows.leases[lease.lease_id] == lease


# -- leases of an ended lender -----------------------------------------------------------------------------------------


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
