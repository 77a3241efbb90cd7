"""The lease book: quotas, answers to a batch, ended members, and permissions of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.coordinator.tokens import Caller, Role
from floodplain.leases.choice import choose_disallowed
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Recall, Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.rules import LeaseLimits
from floodplain.leases.states import (
    Lease,
    LeaseEvent,
    LeaseId,
    LeaseState,
    Outcome,
    Stamp,
)
from tests.support.lease_pair import LeasePair

PRODUCER, CONSUMER = (Caller(((role, "*"),)) for role in (Role.PRODUCER, Role.CONSUMER))
"""Callers whose token is one for all names."""


@pytest.mark.parametrize(
    ("sizes", "outcome"),
    [
        ((2,), Outcome.APPLIED),
        ((2, 3), Outcome.APPLIED),
        ((3, 3), Outcome.DEFERRED),
        ((1,), Outcome.CONFLICT),
        ((4, 1), Outcome.CONFLICT),
        ((9,), Outcome.CONFLICT),
        ((2, 2, 2, 2), Outcome.CONFLICT),
    ],
)
def test_a_request_beyond_a_quota_waits_or_is_refused(sizes: tuple[int, ...], outcome: Outcome) -> None:
    """The consumer has a lease of 3 bytes. It may have 3 leases, of at least 2 bytes each, 8 in total."""
    pair = LeasePair(LeaseLimits(least_lease_bytes=2, max_leases=3, max_borrowed_bytes=8))
    assert pair.grant(1, 3)
    reply = pair.say(Request("c", 1, 2, tuple(Shard(size) for size in sizes)))
    assert (reply.outcome, len(reply.leases)) == (outcome, len(sizes) if outcome is Outcome.APPLIED else 0)
    assert reply.member == pair.row("c") and (not reply.detail) == (outcome is Outcome.APPLIED)


def test_owed_leases_count_until_they_are_settled() -> None:
    pair = LeasePair(LeaseLimits(max_leases=1))
    [lease] = pair.grant(1, 1)
    pair.report(lease, LeaseEvent.HOLD)
    pair.report(lease, LeaseEvent.RELEASE)
    assert pair.grant(2, 1) == []
    pair.observe(0)
    assert len(pair.grant(3, 1)) == 1


def test_a_device_with_all_its_leases_lends_no_more() -> None:
    pair = LeasePair(LeaseLimits(max_leases_on_device=3))
    assert len(pair.grant(1, 1, 1)) == 2
    assert pair.grant(2, 1, 1) == []
    assert len(pair.grant(2, 1)) == 1
    assert pair.grant(3, 1) == []


# -- answers to a batch ------------------------------------------------------------------------------------------------


def test_a_member_with_many_heartbeats_in_a_batch_is_answered_once() -> None:
    pair = LeasePair()
    pair.grant(1, 1, 1)
    request = Request("c", 1, 2, (Shard(1), Shard(1)))
    batch: list[Message] = [Heartbeat("c", 1), request, Join("c", "c-1"), Heartbeat("p", 1), request, Heartbeat("c", 1)]
    replies = pair.book.handle_all(batch, 1.0)
    assert [reply.outcome for reply in replies] == [Outcome.APPLIED] * len(batch)
    first, asked, again, other, repeated, last = (reply.leases for reply in replies)
    assert first is again is last and asked is repeated and len(asked) == 2
    assert set(first) == set(other) == set(pair.book.rows.leases.values()) and len(first) == 4
    assert pair.book.count_told(batch) == 4 + 4 + 2


def test_a_batch_returns_leases_as_they_are_after_it() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 4)
    held = Report("c", lease.lease_id, Stamp(1, 1), LeaseEvent.HOLD)
    batch: list[Message] = [Heartbeat("c", 1), held, Request("c", 1, 1, (Shard(4),)), Request("c", 1, 1, (Shard(4),))]
    beat, _, *_ = pair.book.handle_all(batch, 1.0)
    assert [told.state for told in beat.leases] == [LeaseState.HELD]
    recall = Recall("p", pair.row("p").stamp, 99, deadline_s=3.0)
    beat, copy, recalled, again = pair.book.handle_all([batch[0], batch[2], recall, batch[2]], 2.0)
    assert beat.due_in_s == recalled.due_in_s == {lease.lease_id: 3.0}
    assert [told.state for told in (*copy.leases, *again.leases)] == [LeaseState.HELD] * 2
    assert pair.book.due_in_s(3.0) == {lease.lease_id: 2.0}


def test_a_lease_is_shown_to_its_ends_alone() -> None:
    pair = LeasePair()
    [lease] = pair.grant(1, 4)
    pair.say(Join("eve", "eve-1"))
    reply = pair.say(Report("eve", lease.lease_id, Stamp(1, 1), LeaseEvent.RELEASE))
    assert (reply.outcome, reply.leases, reply.member) == (Outcome.CONFLICT, (), None)


def test_requests_of_a_new_life_are_not_answered_with_leases_of_an_old_one() -> None:
    """Both lives number from 1; the old lease is owed until its producer observes."""
    pair = LeasePair()
    [old] = pair.grant(1, 4)
    pair.say(Leave("c", 1))
    assert pair.say(Join("c", "c-2")).outcome is Outcome.APPLIED
    [new] = pair.grant(1, 3)
    assert (new.generation, new.num_bytes, new.state) == (2, 3, LeaseState.GRANTED)
    assert set(pair.book.rows.leases) == {old.lease_id, new.lease_id}


# -- ended members -----------------------------------------------------------------------------------------------------


def test_a_member_is_forgotten_when_it_ended_long_ago_and_owes_nothing() -> None:
    pair = LeasePair(LeaseLimits(forget_after_s=5.0))
    [lease] = pair.grant(1, 4)
    pair.report(lease, LeaseEvent.HOLD)
    pair.say(Leave("c", 1))
    for pair.now in (1.0, 7.0):
        pair.say(Heartbeat("p", 1))
        pair.book.tick(pair.now)
    assert "c" in pair.book.rows.members  # its lease is owed
    pair.observe(0)
    pair.book.take_changes()
    pair.book.tick(pair.now)
    assert set(pair.book.rows.members) == {"p"}
    changes = pair.book.take_changes()
    assert (changes.members, changes.forgotten) == ((), ("c",)) and changes.floor >= 1


def test_messages_of_a_forgotten_life_are_stale() -> None:
    pair = LeasePair(LeaseLimits(forget_after_s=5.0))
    for life in range(1, 4):
        pair.say(Leave("c", pair.row("c").generation))
        for pair.now in (10.0 * life, 10.0 * life + 6):
            pair.say(Heartbeat("p", 1))
            pair.book.tick(pair.now)
        old = pair.book.rows.floor
        member = pair.say(Join("c", "c-1")).member
        assert member is not None and member.stamp == Stamp(old + 1, old + 1)
        assert pair.say(Heartbeat("c", old)).outcome is Outcome.STALE
        assert pair.say(Leave("c", old)).outcome is Outcome.STALE
        assert pair.say(Request("c", old, 9, (Shard(1),))).outcome is Outcome.STALE


def test_a_full_book_forgets_the_first_ended_member_but_no_live_one() -> None:
    pair = LeasePair(LeaseLimits(max_members=4, forget_after_s=1e9))
    pair.say(Join("d", "d-1"))
    assert pair.say(Join("e", "e-1")).outcome is Outcome.DEFERRED
    pair.say(Leave("d", 1))
    pair.book.tick(0.0)
    assert pair.say(Join("e", "e-1")).outcome is Outcome.APPLIED
    assert set(pair.book.rows.members) == {"p", "c", "e"}


def test_a_crowd_of_consumers_leaves_room_for_lenders() -> None:
    pair = LeasePair(LeaseLimits(max_members=4))
    for number in range(9):
        pair.say(Join(f"c{number}", "i"))
    joined = [pair.book.handle_all([Join(f"q{number}", "i")], 0.0, PRODUCER)[0].outcome for number in range(2)]
    assert (joined, len(pair.book.rows.members)) == ([Outcome.APPLIED, Outcome.DEFERRED], 4)


# -- permissions of tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("has_offered", [True, False])
def test_messages_for_a_lender_with_a_borrowers_token_are_refused(is_alive: bool, has_offered: bool) -> None:
    pair = LeasePair()
    if not has_offered:
        pair.book.handle_all([Join("q", "q-1")], 0.0, PRODUCER)
    lender = "p" if has_offered else "q"
    if not is_alive:
        pair.say(Leave(lender, 1))
    before = pair.row(lender)
    lease = LeaseId("q.1.1.0")
    for generation in (1, 2, 99):
        batch: list[Message] = [
            Join(lender, "new"),
            Join(lender, f"{lender}-1"),
            Heartbeat(lender, generation),
            Leave(lender, generation),
            Request(lender, generation, 1, (Shard(1),)),
            Report(lender, lease, Stamp(generation, 1), LeaseEvent.RELEASE),
        ]
        replies = pair.book.handle_all(batch, 1.0, CONSUMER)
        assert {(reply.outcome, reply.member, reply.leases) for reply in replies} == {(Outcome.CONFLICT, None, ())}
    assert pair.row(lender) == before
    allowed = pair.book.handle_all([Join("new", "n-1"), Heartbeat("new", 1)], 1.0, CONSUMER)
    assert [reply.outcome for reply in allowed] == [Outcome.APPLIED] * 2


# -- pairs that a placement allows -------------------------------------------------------------------------------------


NAMES = st.sampled_from(["a", "b", "c"])
LEASES = st.lists(st.tuples(NAMES, NAMES, st.sampled_from(list(LeaseState))), max_size=8)
PAIRS = st.none() | st.dictionaries(NAMES, st.lists(NAMES, max_size=3))


def lease(number: int, producer: str, consumer: str, state: LeaseState) -> Lease:
    return Lease(LeaseId(f"{consumer}.1.{number}.0"), number, producer, consumer, 5, 1, state)


@given(LEASES, PAIRS)
def test_what_is_counted_on_is_allowed_or_chosen(
    rows: list[tuple[str, str, LeaseState]], pairs: dict[str, list[str]] | None
) -> None:
    leases = [lease(number, *row) for number, row in enumerate(rows)]
    chosen = choose_disallowed(leases, pairs)
    for each in leases:
        is_counted_on = each.state in (LeaseState.GRANTED, LeaseState.HELD)
        is_allowed = pairs is None or each.producer in pairs.get(each.consumer, [])
        assert (each in chosen) == (is_counted_on and not is_allowed)


def test_a_lease_that_is_no_longer_allowed_is_recalled_and_settled() -> None:
    pair = LeasePair()
    [held, kept] = [pair.grant(number, 4)[0] for number in (1, 2)]
    pair.report(held, LeaseEvent.HOLD)
    pair.report(kept, LeaseEvent.RELEASE)  # owed: there is nothing to recall
    recalled = pair.book.allow({"c": ["q"]}, pair.now, 5.0)
    assert [(each.lease_id, each.state) for each in recalled] == [(held.lease_id, LeaseState.RECALLED)]
    assert pair.say(Heartbeat("c", 1)).due_in_s == {held.lease_id: 5.0}
    assert pair.book.allow({"c": []}, pair.now + 1.0, 5.0) == []
    assert pair.book.due_in_s(pair.now + 1.0) == {held.lease_id: 4.0}  # the deadline of the first recall
    assert pair.row("p").offered_bytes == 10
    assert pair.report(held, LeaseEvent.RELEASE).outcome is Outcome.APPLIED
    assert len(pair.observe(0).leases) == 2
    assert pair.row("p").offered_bytes == 2
