"""One member and a book, with messages carried by hand: late answers, late offers, stopped members; statistics."""

from __future__ import annotations

import pytest

from floodplain.leases.book import LeaseBook
from floodplain.leases.member import Borrower, Lender, MemberSide
from floodplain.leases.messages import Heartbeat, Message, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome
from floodplain.lending.membership import LentDevice, Membership
from tests.support.lease_pair import TTL_S, LeasePair


class MemberPair(LeasePair):
    """A pair whose consumer is a real one, with a lease of six bytes, at second 0."""

    def __init__(self) -> None:
        super().__init__()
        self.side = MemberSide("c", "c-1", TTL_S)
        self.borrower = Borrower(self.side)
        self.deliver(self.side.greeting(), 0.0)
        self.borrower.ask([Shard(6)])
        self.say_all(0.0)

    def deliver(self, message: Message, now: float) -> None:
        """Deliver the consumer's message and its answer at once."""
        self.side.learn(message, self.book.handle(message, now), now, now)

    def say_all(self, now: float) -> None:
        for message in self.borrower.say():
            self.deliver(message, now)

    def granted(self, now: float) -> list[LeaseId]:
        return [lease.lease_id for lease in self.borrower.to_allocate(now)]


def test_of_two_overlapping_answers_the_later_one_is_no_news() -> None:
    """The heartbeat sent first arrives last: its list is the newer one, without the ended lease."""
    pair = MemberPair()
    [lease_id] = pair.granted(1.0)
    late, quick = Heartbeat("c", 1), Heartbeat("c", 1)
    list_with_it = pair.book.handle(quick, 3.0)
    pair.borrower.refused(lease_id, "no range is free")
    pair.say_all(4.0)
    pair.observe(0)
    list_without_it = pair.book.handle(late, 5.0)
    pair.side.learn(late, list_without_it, 2.0, 5.0)
    pair.say_all(5.0)
    pair.side.learn(quick, list_with_it, 3.0, 6.0)
    assert pair.granted(6.0) == []
    pair.borrower.ask([Shard(4)])
    pair.say_all(7.0)
    assert len(pair.granted(7.0)) == 1


def test_a_member_stopped_before_it_allocated_frees_at_once() -> None:
    pair = MemberPair()
    [lease_id] = pair.granted(TTL_S)  # it checks the lease, then is stopped
    assert not pair.borrower.allocated(lease_id, TTL_S + 0.1)
    assert pair.borrower.to_free() == {lease_id: float("-inf")}
    pair.borrower.freed(lease_id)
    assert pair.borrower.to_free() == {}


def test_a_member_stopped_after_it_allocated_frees_an_expired_lease() -> None:
    pair = MemberPair()
    [lease_id] = pair.granted(TTL_S)
    assert pair.borrower.allocated(lease_id, TTL_S)
    pair.book.handle(Heartbeat("p", 1), TTL_S)
    assert pair.book.tick(TTL_S + 0.1) == ["c"]
    assert pair.borrower.to_free() == {}
    pair.deliver(pair.side.greeting(), TTL_S + 1.0)
    assert pair.borrower.to_free() == {lease_id: float("-inf")}
    pair.borrower.freed(lease_id)
    pair.deliver(pair.side.greeting(), TTL_S + 1.0)
    pair.say_all(TTL_S + 1.0)
    assert pair.side.known[lease_id].lease.state is LeaseState.RELEASED


def test_bytes_allocated_in_a_settled_lease_are_freed() -> None:
    """The member's clock is slow: it reads the TTL's end after the lease has been settled."""
    pair = MemberPair()
    [lease_id] = pair.granted(TTL_S)
    pair.book.handle(Heartbeat("p", 1), TTL_S)
    pair.book.tick(TTL_S + 0.1)
    pair.observe(0)
    assert pair.borrower.allocated(lease_id, TTL_S)
    for _ in ("taken for dead", "joined anew"):
        pair.deliver(pair.side.greeting(), TTL_S + 1.0)
    assert lease_id not in pair.side.known
    assert pair.borrower.to_free() == {lease_id: float("-inf")}


class LoneLender:
    """A book, and a lender that has joined and sent an offer that has not arrived."""

    def __init__(self) -> None:
        self.book = LeaseBook(TTL_S, now=0.0)
        self.side = MemberSide("p", "p-1", TTL_S)
        self.lender = Lender(self.side, capacity_bytes=16, deadline_s=1.0)
        self.say(self.side.greeting())
        self.lender.target_bytes = 10
        said = self.lender.say(own_bytes=6, foreign_bytes=0)
        assert isinstance(said, Offer)
        self.late = said
        self.lender.target_bytes = 0

    def say(self, message: Message) -> Reply:
        """Deliver the message and its answer at once."""
        reply = self.book.handle(message, 0.0)
        self.side.learn(message, reply, 0.0, 0.0)
        return reply

    def say_next(self) -> Message | None:
        """Deliver the lender's next message, if any."""
        message = self.lender.say(own_bytes=6, foreign_bytes=0)
        if message is not None:
            self.say(message)
        return message


def test_an_offer_that_is_not_wanted_any_more_and_comes_late_is_stale() -> None:
    pair = LoneLender()
    assert pair.lender.promised_bytes == 10
    assert isinstance(pair.say_next(), Offer)
    assert pair.lender.promised_bytes == 0, "its pool may have the bytes again"
    assert pair.book.handle(pair.late, 0.0).outcome is Outcome.STALE
    assert pair.say_next() is None


def test_an_offer_that_arrived_and_whose_answer_was_lost_is_withdrawn() -> None:
    pair = LoneLender()
    assert pair.book.handle(pair.late, 0.0).outcome is Outcome.APPLIED
    assert isinstance(pair.say_next(), Offer), "and learns that it is stale"
    assert pair.lender.promised_bytes == 10
    assert isinstance(pair.say_next(), Recall)
    assert pair.lender.promised_bytes == pair.book.rows.members["p"].offered_bytes == 0


def test_an_offer_that_may_still_come_is_withdrawn_by_last_words() -> None:
    pair = LoneLender()
    assert not pair.lender.has_said_all
    last = pair.lender.say_last(foreign_bytes=0)
    assert last == Offer("p", pair.side.stamp, 0)
    pair.say(last)
    assert pair.lender.has_said_all and pair.book.handle(pair.late, 0.0).outcome is Outcome.STALE


def test_many_requests_are_sent_in_parts_after_reports_on_leases() -> None:
    """No request is left out for ever: those that do not fit are sent next."""
    pair = MemberPair()
    [lease] = pair.borrower.to_allocate(0.0)
    pair.borrower.allocated(lease.lease_id, 0.0)
    for _ in range(7):
        pair.borrower.ask([Shard(99)])
    said = [pair.borrower.say(4) for _ in range(4)]
    assert all(len(part) <= 4 and isinstance(part[0], Report) for part in said)
    numbers = [message.number for part in said for message in part if isinstance(message, Request)]
    assert numbers == [2, 3, 4, 5, 6, 7, 8, 2, 3, 4]
    assert len(pair.borrower.say()) == len(pair.borrower.say()) == 8


# -- a membership's statistics of its leases ---------------------------------------------------------------------------


class Told:
    """A membership and its clock; a test supplies the answers."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        device = LentDevice(capacity_bytes=100, foreign_bytes=lambda: 0)
        self.membership = Membership(name, "life", device, clock=lambda: self.now)

    def hear(self, at_s: float, *leases: Lease, due_in_s: float | None = None) -> None:
        self.now = at_s
        messages, sent_s = self.membership.collect()
        row = Member(self.membership.name, "life", revision=int(at_s), offered_bytes=100)
        due = {} if due_in_s is None else {lease.lease_id: due_in_s for lease in leases}
        replies = [Reply(Outcome.APPLIED, row, leases, due) for _ in messages]
        self.membership.learn(messages, replies, 10.0, sent_s)


HELD = Lease(LeaseId("l"), 1, "lender", "borrower", 40, 1, LeaseState.HELD, held_bytes=40)
RECALLED = HELD.after(LeaseEvent.RECALL, deadline_s=5.0)
RELEASED = RECALLED.after(LeaseEvent.RELEASE)
SETTLED = RELEASED.after(LeaseEvent.SETTLE)


@pytest.mark.parametrize(
    ("name", "role", "peer"), [("lender", "producer", "borrower"), ("borrower", "consumer", "lender")]
)
def test_a_lease_counts_until_it_has_ended_even_if_its_row_is_still_known(name: str, role: str, peer: str) -> None:
    told = Told(name)
    told.hear(1.0, HELD)
    assert told.membership.lease_bytes() == {(role, peer): 40}
    for at_s, lease in ((2.0, RECALLED), (3.0, RELEASED)):
        told.hear(at_s, lease)
        assert told.membership.lease_bytes() == {(role, peer): 40}
    told.hear(4.0, SETTLED)
    assert told.membership.lease_bytes() == {}


@pytest.mark.parametrize(
    ("name", "role", "peer"), [("lender", "producer", "borrower"), ("borrower", "consumer", "lender")]
)
def test_a_listed_lease_counts_down_once_it_is_recalled(name: str, role: str, peer: str) -> None:
    told = Told(name)
    told.hear(1.0, HELD)
    assert told.membership.list_leases() == [(role, peer, 40, None)]
    told.hear(2.0, RECALLED, due_in_s=5.0)
    for now, left_s in ((2.0, 5.0), (6.0, 1.0), (8.0, -1.0)):
        told.now = now
        assert told.membership.list_leases() == [(role, peer, 40, left_s)]
    told.hear(9.0, SETTLED)
    assert told.membership.list_leases() == []


@pytest.mark.parametrize(("name", "seconds"), [("lender", 6.0), ("borrower", 1.0)])
def test_a_recall_ends_when_a_consumer_freed_or_a_producer_saw_the_bytes(name: str, seconds: float) -> None:
    told = Told(name)
    told.hear(1.0, HELD)
    told.hear(2.0, RECALLED)
    told.hear(3.0, RELEASED)
    told.hear(8.0, SETTLED)
    assert told.membership.take_recall_times() == [seconds]
    told.hear(9.0)
    assert told.membership.take_recall_times() == []


def test_only_a_lender_expects_bytes_from_its_recall_until_the_settlement() -> None:
    lender, borrower = Told("lender"), Told("borrower")
    for at_s, lease, expects in (
        (1.0, HELD, False),
        (2.0, RECALLED, True),
        (3.0, RELEASED, True),
        (4.0, SETTLED, False),
    ):
        for told in (lender, borrower):
            told.hear(at_s, lease)
        assert lender.membership.expects_bytes is expects
        assert not borrower.membership.expects_bytes
