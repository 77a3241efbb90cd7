"""One member and a book, with messages carried by hand: late answers, late offers, stopped members."""

from __future__ import annotations

from floodplain.leases.book import LeaseBook
from floodplain.leases.member import Borrower, Lender, MemberSide
from floodplain.leases.messages import Heartbeat, Join, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import LeaseId, LeaseState, Outcome

TTL_S = 10.0


class LeasePair:
    """A book with a producer that has offered ten bytes, and a consumer with a lease of six of them, at second 0."""

    def __init__(self) -> None:
        self.book = LeaseBook(TTL_S, now=0.0)
        for message in (Join("p", "p-1"), Join("c", "c-1")):
            self.book.handle(message, 0.0)
        self.book.handle(Offer("p", self.book.rows.members["p"].stamp, 10), 0.0)
        self.side = MemberSide("c", "c-1", TTL_S)
        self.borrower = Borrower(self.side)
        self.say(self.side.greeting(), 0.0)
        self.borrower.ask([Shard(6)])
        self.say_all(0.0)

    def say(self, message: Message, now: float) -> None:
        """Deliver the message and its answer at once."""
        self.side.learn(message, self.book.handle(message, now), now, now)

    def say_all(self, now: float) -> None:
        for message in self.borrower.say():
            self.say(message, now)

    def settle(self, now: float) -> None:
        """Let the producer observe that all bytes are free."""
        self.book.handle(Observe("p", self.book.rows.members["p"].stamp, 0), now)

    def granted(self, now: float) -> list[LeaseId]:
        return [lease.lease_id for lease in self.borrower.to_allocate(now)]


def test_of_two_overlapping_answers_the_later_one_is_no_news() -> None:
    """The heartbeat sent first arrives last: its list is the newer one, without the ended lease."""
    pair = LeasePair()
    [lease_id] = pair.granted(1.0)
    late, quick = Heartbeat("c", 1), Heartbeat("c", 1)
    list_with_it = pair.book.handle(quick, 3.0)
    pair.borrower.refused(lease_id, "no range is free")
    pair.say_all(4.0)
    pair.settle(4.0)
    list_without_it = pair.book.handle(late, 5.0)
    pair.side.learn(late, list_without_it, 2.0, 5.0)
    pair.say_all(5.0)
    pair.side.learn(quick, list_with_it, 3.0, 6.0)
    assert pair.granted(6.0) == []
    pair.borrower.ask([Shard(4)])
    pair.say_all(7.0)
    assert len(pair.granted(7.0)) == 1


def test_a_member_stopped_before_it_allocated_frees_at_once() -> None:
    pair = LeasePair()
    [lease_id] = pair.granted(TTL_S)  # it checks the lease, then is stopped
    assert not pair.borrower.allocated(lease_id, TTL_S + 0.1)
    assert pair.borrower.to_free() == {lease_id: float("-inf")}
    pair.borrower.freed(lease_id)
    assert pair.borrower.to_free() == {}


def test_a_member_stopped_after_it_allocated_frees_an_expired_lease() -> None:
    pair = LeasePair()
    [lease_id] = pair.granted(TTL_S)
    assert pair.borrower.allocated(lease_id, TTL_S)
    pair.book.handle(Heartbeat("p", 1), TTL_S)
    assert pair.book.tick(TTL_S + 0.1) == ["c"]
    assert pair.borrower.to_free() == {}
    pair.say(pair.side.greeting(), TTL_S + 1.0)
    assert pair.borrower.to_free() == {lease_id: float("-inf")}
    pair.borrower.freed(lease_id)
    pair.say(pair.side.greeting(), TTL_S + 1.0)
    pair.say_all(TTL_S + 1.0)
    assert pair.side.known[lease_id].lease.state is LeaseState.RELEASED


def test_bytes_allocated_in_a_settled_lease_are_freed() -> None:
    """The member's clock is slow: it reads the TTL's end after the lease has been settled."""
    pair = LeasePair()
    [lease_id] = pair.granted(TTL_S)
    pair.book.handle(Heartbeat("p", 1), TTL_S)
    pair.book.tick(TTL_S + 0.1)
    pair.settle(TTL_S + 0.1)
    assert pair.borrower.allocated(lease_id, TTL_S)
    for _ in ("taken for dead", "joined anew"):
        pair.say(pair.side.greeting(), TTL_S + 1.0)
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
    pair = LeasePair()
    [lease] = pair.borrower.to_allocate(0.0)
    pair.borrower.allocated(lease.lease_id, 0.0)
    for _ in range(7):
        pair.borrower.ask([Shard(99)])
    said = [pair.borrower.say(4) for _ in range(4)]
    assert all(len(part) <= 4 and isinstance(part[0], Report) for part in said)
    numbers = [message.number for part in said for message in part if isinstance(message, Request)]
    assert numbers == [2, 3, 4, 5, 6, 7, 8, 2, 3, 4]
    assert len(pair.borrower.say()) == len(pair.borrower.say()) == 8
