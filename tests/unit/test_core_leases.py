"""One lease, one member, one book: the table of changes, what is stale, who is granted what, what a look settles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.leases.book import LeaseBook
from floodplain.core.leases.borrower import Borrower
from floodplain.core.leases.choice import choose_producers, choose_recalls
from floodplain.core.leases.limits import DEFAULT_LIMITS, LeaseLimits
from floodplain.core.leases.member import MemberSide
from floodplain.core.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.core.leases.rows import Member, Reply, Shard
from floodplain.core.leases.states import (
    ENDED,
    OWED,
    TRANSITIONS,
    Lease,
    LeaseEvent,
    LeaseId,
    LeaseState,
    Outcome,
    Stamp,
    draw_table,
    judge,
    judge_copy,
)

TTL_S = 10.0
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
def test_a_lease_changes_as_the_table_says_or_loudly_not_at_all(state: LeaseState, event: LeaseEvent) -> None:
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
    assert draw_table() in DESIGN.read_text()


# -- what is stale -----------------------------------------------------------------------------------------------------


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


# -- who gets what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "chosen"),
    [
        ([Shard(4)], ["b"]),
        ([Shard(4, "a")], ["a"]),
        ([Shard(6), Shard(4)], ["b", "a"]),
        ([Shard(4), Shard(5, "b")], ["a", "b"]),
        ([Shard(8)], None),
        ([Shard(1), Shard(1, "nobody")], None),
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


class Desk:
    """A book with a producer that has put up ten bytes and a consumer, and short names for what they say."""

    def __init__(self, limits: LeaseLimits = DEFAULT_LIMITS) -> None:
        self.book = LeaseBook(TTL_S, now=0.0, limits=limits)
        self.now = 0.0
        for name in ("p", "c"):
            assert self.say(Join(name, f"{name}-1")).outcome is Outcome.APPLIED
        assert self.say(Offer("p", self.row("p").stamp, 10)).outcome is Outcome.APPLIED

    def say(self, message: Join | Leave | Heartbeat | Offer | Recall | Observe | Request | Report) -> Reply:
        reply = self.book.handle(message, self.now)
        self.book.rows.check_integrity()
        return reply

    def row(self, name: str) -> Member:
        return self.book.rows.members[name]

    def grant(self, number: int, *sizes: int) -> list[Lease]:
        reply = self.say(Request("c", self.row("c").generation, number, tuple(Shard(size) for size in sizes)))
        return list(reply.leases)

    def report(self, lease: Lease, event: LeaseEvent) -> Reply:
        known = self.book.rows.leases[lease.lease_id]
        return self.say(Report("c", lease.lease_id, Stamp(known.generation, known.revision), event))

    def observe(self, foreign_bytes: int) -> Reply:
        return self.say(Observe("p", self.row("p").stamp, foreign_bytes))


def test_a_lease_from_offer_to_settlement() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    assert desk.book.rows.unleased_bytes("p") == 4
    assert desk.report(lease, LeaseEvent.HOLD).outcome is Outcome.APPLIED
    reply = desk.say(Recall("p", desk.row("p").stamp, 10, deadline_s=3.0))
    assert reply.due_in_s == {lease.lease_id: 3.0}
    assert desk.row("p").offered_bytes == 6  # what nobody had leased is back at once
    assert desk.grant(2, 1) == []
    assert desk.report(lease, LeaseEvent.RELEASE).outcome is Outcome.APPLIED
    assert desk.grant(2, 1) == []  # owed
    assert desk.observe(6).leases == ()  # still there
    assert [lease.state for lease in desk.observe(0).leases] == [LeaseState.SETTLED]
    assert desk.row("p").offered_bytes == 0
    assert desk.book.rows.leases == {}


def test_a_request_is_granted_once_and_not_again_after_its_leases_ended() -> None:
    desk = Desk()
    request = Request("c", 1, 1, (Shard(3), Shard(3)))
    first = desk.say(request)
    assert desk.say(request).leases == first.leases
    for lease in first.leases:
        desk.report(lease, LeaseEvent.RELEASE)
    desk.observe(0)
    assert desk.say(request).outcome is Outcome.STALE
    assert desk.book.rows.leases == {}


def test_a_request_that_a_later_one_overtook_is_open_no_more() -> None:
    """Numbers that are granted only rise, so it can never be granted: who still wants it asks again."""
    desk, side = Desk(), MemberSide("b", "b-1", TTL_S)
    borrower = Borrower(side)
    side.learn(Join("b", "b-1"), desk.say(Join("b", "b-1")), 0.0, 0.0)
    for num_bytes in (11, 3):  # more than there is, then less
        borrower.ask([Shard(num_bytes)])
    for now in (1.0, 2.0):
        assert 1 in side.open_requests
        for message in borrower.say():
            side.learn(message, desk.say(message), now, now)
    assert not side.open_requests
    assert [lease.request for lease in borrower.to_allocate(2.0)] == [2]
    late = Request("b", side.stamp.generation - 1, borrower.ask([Shard(11)]), (Shard(11),))
    side.learn(late, Reply(Outcome.STALE, replace(desk.row("b"), last_request=3)), 2.0, 2.0)
    assert 3 in side.open_requests  # an answer to an earlier life says nothing of this one


def test_a_look_from_before_an_allocation_settles_nothing() -> None:
    desk = Desk()
    lease, other = desk.grant(1, 3, 3)
    desk.report(other, LeaseEvent.RELEASE)
    look = Observe("p", desk.row("p").stamp, 0)
    desk.report(lease, LeaseEvent.HOLD)
    assert desk.say(look).outcome is Outcome.STALE


def test_a_look_from_before_a_release_of_what_was_never_reported_settles_nothing() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    look = Observe("p", desk.row("p").stamp, 0)
    desk.report(lease, LeaseEvent.RELEASE)
    assert desk.say(look).outcome is Outcome.STALE
    assert [lease.state for lease in desk.observe(0).leases] == [LeaseState.SETTLED]


def test_a_look_from_before_an_expiry_settles_nothing() -> None:
    """The consumer allocated after the look, its report was lost, and then it stopped: its bytes are still taken."""
    desk = Desk()
    desk.grant(1, 6)
    look = Observe("p", desk.row("p").stamp, 0)
    desk.now = TTL_S
    desk.say(Heartbeat("p", 1))
    desk.now = TTL_S + 0.1
    assert desk.book.tick(desk.now) == ["c"]
    assert desk.say(look).outcome is Outcome.STALE
    assert desk.book.rows.leased_bytes("p") == 6
    assert [lease.state for lease in desk.observe(6).leases] == []


def test_whoever_is_silent_for_a_ttl_loses_what_it_borrowed_and_withdraws_what_it_offered() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    desk.now = TTL_S
    assert desk.book.tick(desk.now) == []
    desk.say(Heartbeat("p", 1))
    desk.now = TTL_S + 0.1
    assert desk.book.tick(desk.now) == ["c"]
    assert desk.book.rows.leases[lease.lease_id].state is LeaseState.EXPIRED
    assert desk.say(Heartbeat("c", 1)).outcome is Outcome.STALE
    assert desk.say(Join("c", "c-1")).member == Member("c", "c-1", generation=2, revision=desk.row("c").revision)
    assert desk.row("p").offered_bytes == 10
    desk.now += TTL_S + 0.1
    desk.book.tick(desk.now)
    assert desk.row("p").offered_bytes == 6  # owed bytes stay put up until they are seen free


def test_when_the_last_of_a_name_has_ended_what_it_lent_is_settled_by_its_consumers_word() -> None:
    desk = Desk()
    [held], [granted] = desk.grant(1, 2), desk.grant(2, 2)
    desk.report(held, LeaseEvent.HOLD)
    desk.say(Leave("p", 1, is_last=True))
    assert [lease.state for lease in desk.book.rows.leases.values()] == [LeaseState.HELD, LeaseState.GRANTED]
    for lease, event in ((held, LeaseEvent.RELEASE), (granted, LeaseEvent.REFUSE)):
        reply = desk.report(lease, event)
        assert reply.outcome is Outcome.APPLIED and reply.leases[0].state is LeaseState.SETTLED
    assert desk.row("p").offered_bytes == 0 and not desk.book.rows.leases


def test_what_is_owed_when_the_last_of_a_name_ends_and_what_expires_then_is_settled_at_once() -> None:
    desk = Desk()
    [released], _ = desk.grant(1, 2), desk.grant(2, 2)
    desk.report(released, LeaseEvent.RELEASE)
    desk.say(Leave("p", 1, is_last=True))
    assert [lease.state for lease in desk.book.rows.leases.values()] == [LeaseState.GRANTED]
    desk.say(Leave("c", 1))
    assert not desk.book.rows.leases and desk.row("p").offered_bytes == 0


def test_a_process_takes_the_name_of_another_only_when_that_one_has_ended() -> None:
    desk = Desk()
    assert desk.say(Join("c", "c-2")).outcome is Outcome.DEFERRED
    assert desk.say(Leave("c", 1)).outcome is Outcome.APPLIED
    reply = desk.say(Join("c", "c-2"))
    assert reply.outcome is Outcome.APPLIED
    assert desk.row("c").generation == 2
    assert desk.say(Leave("c", 1)).outcome is Outcome.STALE


def test_after_a_restart_everybody_has_a_ttl_and_a_recall_its_deadline_again() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    desk.say(Recall("p", desk.row("p").stamp, 10, deadline_s=3.0))
    rows = desk.book.rows
    book = LeaseBook(TTL_S, 100.0, rows.members.values(), rows.leases.values())
    assert book.tick(100.0 + TTL_S) == []
    assert [late.lease_id for late in book.overdue(103.5)] == [lease.lease_id]
    assert book.overdue(102.5) == []
    assert book.handle(Heartbeat("c", 1), 101.0).due_in_s == {lease.lease_id: 2.0}
    assert book.take_changes().leases == ()


def test_what_is_lost_with_a_device_is_lost_and_its_name_can_be_used_again() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    desk.report(lease, LeaseEvent.HOLD)
    assert desk.book.forget("nobody").outcome is Outcome.CONFLICT
    assert [lost.state for lost in desk.book.forget("p").leases] == [LeaseState.LOST]
    assert desk.say(Join("p", "p-2")).outcome is Outcome.APPLIED
    assert desk.row("p").offered_bytes == 0
    late = Report("c", lease.lease_id, Stamp(lease.generation, lease.revision), LeaseEvent.RELEASE)
    assert desk.say(late).outcome is Outcome.STALE


def test_what_may_still_be_allocated_is_kept_of_the_next_device_of_that_name() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    assert [kept.state for kept in desk.book.forget("p").leases] == [LeaseState.RECALLED]
    assert desk.say(Join("p", "p-2")).outcome is Outcome.APPLIED
    assert desk.row("p").offered_bytes == 6
    assert desk.say(Heartbeat("c", 1)).due_in_s == {lease.lease_id: 0.0}
    assert desk.observe(0).leases == ()  # it may have been allocated since
    desk.report(lease, LeaseEvent.RELEASE)
    assert [settled.state for settled in desk.observe(0).leases] == [LeaseState.SETTLED]
    assert desk.row("p").offered_bytes == 0


def test_a_device_that_is_not_followed_is_forgotten_for_good_when_its_consumers_have_heard() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    desk.book.forget("p")
    desk.report(lease, LeaseEvent.RELEASE)
    assert [lost.state for lost in desk.book.forget("p").leases] == [LeaseState.LOST]
    assert desk.book.rows.leases == {}


def test_offers_below_what_is_leased_are_refused_with_what_to_do() -> None:
    desk = Desk()
    desk.grant(1, 6)
    reply = desk.say(Offer("p", desk.row("p").stamp, 5))
    assert reply.outcome is Outcome.CONFLICT
    assert "recall" in reply.detail
    assert desk.say(Offer("p", desk.row("p").stamp, 6)).outcome is Outcome.APPLIED


def test_consumers_borrow_from_whom_they_may() -> None:
    desk = Desk()
    desk.book.may_borrow_from = {"c": ["q"]}
    assert desk.grant(1, 1) == []
    desk.book.may_borrow_from = {"c": ["q", "p"]}
    assert [lease.producer for lease in desk.grant(1, 1)] == ["p"]


def test_nobody_reports_of_what_another_borrowed_nor_what_only_others_can_say() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 6)
    stamp = Stamp(lease.generation, lease.revision)
    assert desk.say(Report("p", lease.lease_id, stamp, LeaseEvent.RELEASE)).outcome is Outcome.CONFLICT
    assert desk.say(Report("c", lease.lease_id, stamp, LeaseEvent.SETTLE)).outcome is Outcome.CONFLICT
    assert desk.book.rows.leases[lease.lease_id] == lease


# -- limits ------------------------------------------------------------------------------------------------------------


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
    """The consumer has one lease of three bytes; it may have three, of at least two and together eight."""
    desk = Desk(LeaseLimits(least_lease_bytes=2, max_leases=3, max_borrowed_bytes=8))
    assert desk.grant(1, 3)
    reply = desk.say(Request("c", 1, 2, tuple(Shard(size) for size in sizes)))
    assert (reply.outcome, len(reply.leases)) == (outcome, len(sizes) if outcome is Outcome.APPLIED else 0)
    assert reply.member == desk.row("c") and (not reply.detail) == (outcome is Outcome.APPLIED)


def test_owed_leases_count_until_they_are_settled() -> None:
    desk = Desk(LeaseLimits(max_leases=1))
    [lease] = desk.grant(1, 1)
    desk.report(lease, LeaseEvent.HOLD)
    desk.report(lease, LeaseEvent.RELEASE)
    assert desk.grant(2, 1) == []
    desk.observe(0)
    assert len(desk.grant(3, 1)) == 1


def test_a_device_with_all_its_leases_lends_no_more() -> None:
    desk = Desk(LeaseLimits(max_leases_on_device=3))
    assert len(desk.grant(1, 1, 1)) == 2
    assert desk.grant(2, 1, 1) == []
    assert len(desk.grant(2, 1)) == 1
    assert desk.grant(3, 1) == []


# -- answers to a batch ------------------------------------------------------------------------------------------------


def test_however_often_a_member_beats_in_a_batch_it_is_told_once() -> None:
    desk = Desk()
    desk.grant(1, 1, 1)
    request = Request("c", 1, 2, (Shard(1), Shard(1)))
    batch: list[Message] = [Heartbeat("c", 1), request, Join("c", "c-1"), Heartbeat("p", 1), request, Heartbeat("c", 1)]
    replies = desk.book.handle_all(batch, 1.0)
    assert [reply.outcome for reply in replies] == [Outcome.APPLIED] * len(batch)
    first, asked, again, other, repeated, last = (reply.leases for reply in replies)
    assert first is again is last and asked is repeated and len(asked) == 2
    assert set(first) == set(other) == set(desk.book.rows.leases.values()) and len(first) == 4
    assert desk.book.count_told(batch) == 4 + 4 + 2


def test_a_batch_tells_leases_as_they_are_after_it() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 4)
    held = Report("c", lease.lease_id, Stamp(1, 1), LeaseEvent.HOLD)
    batch: list[Message] = [Heartbeat("c", 1), held, Request("c", 1, 1, (Shard(4),)), Request("c", 1, 1, (Shard(4),))]
    beat, _, *_ = desk.book.handle_all(batch, 1.0)
    assert [told.state for told in beat.leases] == [LeaseState.HELD]
    recall = Recall("p", desk.row("p").stamp, 99, deadline_s=3.0)
    beat, copy, recalled, again = desk.book.handle_all([batch[0], batch[2], recall, batch[2]], 2.0)
    assert beat.due_in_s == recalled.due_in_s == {lease.lease_id: 3.0}
    assert [told.state for told in (*copy.leases, *again.leases)] == [LeaseState.HELD] * 2
    assert desk.book.due_in_s(3.0) == {lease.lease_id: 2.0}


def test_a_lease_is_shown_to_its_ends_alone() -> None:
    desk = Desk()
    [lease] = desk.grant(1, 4)
    desk.say(Join("eve", "eve-1"))
    reply = desk.say(Report("eve", lease.lease_id, Stamp(1, 1), LeaseEvent.RELEASE))
    assert (reply.outcome, reply.leases, reply.member) == (Outcome.CONFLICT, (), None)


# -- members that are gone ---------------------------------------------------------------------------------------------


def test_a_member_is_forgotten_when_it_ended_long_ago_and_owes_nothing() -> None:
    desk = Desk(LeaseLimits(forget_after_s=5.0))
    [lease] = desk.grant(1, 4)
    desk.report(lease, LeaseEvent.HOLD)
    desk.say(Leave("c", 1))
    for desk.now in (1.0, 7.0):
        desk.say(Heartbeat("p", 1))
        desk.book.tick(desk.now)
    assert "c" in desk.book.rows.members  # its lease is owed
    desk.observe(0)
    desk.book.take_changes()
    desk.book.tick(desk.now)
    assert set(desk.book.rows.members) == {"p"}
    changes = desk.book.take_changes()
    assert (changes.members, changes.forgotten) == ((), ("c",)) and changes.floor >= 1


def test_what_a_forgotten_life_still_says_is_stale() -> None:
    desk = Desk(LeaseLimits(forget_after_s=5.0))
    for life in range(1, 4):
        desk.say(Leave("c", desk.row("c").generation))
        for desk.now in (10.0 * life, 10.0 * life + 6):
            desk.say(Heartbeat("p", 1))
            desk.book.tick(desk.now)
        old = desk.book.rows.floor
        member = desk.say(Join("c", "c-1")).member
        assert member is not None and member.stamp == Stamp(old + 1, old + 1)
        assert desk.say(Heartbeat("c", old)).outcome is Outcome.STALE
        assert desk.say(Leave("c", old)).outcome is Outcome.STALE
        assert desk.say(Request("c", old, 9, (Shard(1),))).outcome is Outcome.STALE


def test_a_full_book_forgets_who_ended_first_but_never_the_living() -> None:
    desk = Desk(LeaseLimits(max_members=4, forget_after_s=1e9))
    desk.say(Join("d", "d-1"))
    assert desk.say(Join("e", "e-1")).outcome is Outcome.DEFERRED
    desk.say(Leave("d", 1))
    desk.book.tick(0.0)
    assert desk.say(Join("e", "e-1")).outcome is Outcome.APPLIED
    assert set(desk.book.rows.members) == {"p", "c", "e"}


def test_a_crowd_of_consumers_leaves_room_for_lenders() -> None:
    desk = Desk(LeaseLimits(max_members=4))
    for number in range(9):
        desk.say(Join(f"c{number}", "i"))
    joined = [desk.book.handle_all([Join(f"q{number}", "i")], 0.0, Producers())[0].outcome for number in range(2)]
    assert (joined, len(desk.book.rows.members)) == ([Outcome.APPLIED, Outcome.DEFERRED], 4)


# -- whose life it is --------------------------------------------------------------------------------------------------


class Borrowers:
    """A token of consumers, for whatever name."""

    def may_lend(self, _: str) -> bool:
        return False

    def is_producer(self, _: str) -> bool:
        return False


class Producers(Borrowers):
    """A token of producers."""

    def may_lend(self, _: str) -> bool:
        return True

    is_producer = may_lend


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("has_offered", [True, False])
def test_who_may_only_borrow_says_nothing_for_a_lender(is_alive: bool, has_offered: bool) -> None:
    desk = Desk()
    if not has_offered:
        desk.book.handle_all([Join("q", "q-1")], 0.0, Producers())
    lender = "p" if has_offered else "q"
    if not is_alive:
        desk.say(Leave(lender, 1))
    before = desk.row(lender)
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
        replies = desk.book.handle_all(batch, 1.0, Borrowers())
        assert {(reply.outcome, reply.member, reply.leases) for reply in replies} == {(Outcome.CONFLICT, None, ())}
    assert desk.row(lender) == before
    allowed = desk.book.handle_all([Join("new", "n-1"), Heartbeat("new", 1)], 1.0, Borrowers())
    assert [reply.outcome for reply in allowed] == [Outcome.APPLIED] * 2
