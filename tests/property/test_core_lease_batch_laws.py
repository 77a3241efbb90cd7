"""A batch has the effect of its messages one by one, and returns each member's leases once, after the batch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.leases.book import LeaseBook
from floodplain.leases.member import MemberSide
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.rules import LeaseLimits
from floodplain.leases.states import LeaseEvent, LeaseId, Outcome, Stamp
from tests.support.examples import examples

LIMITS = LeaseLimits(least_lease_bytes=2, max_leases=5, max_borrowed_bytes=20, max_leases_on_device=6)
NAMES = st.sampled_from(["p", "c"])
STAMPS = st.builds(Stamp, st.just(1), st.integers(1, 6))
LEASE_IDS = st.builds(
    "c.1.{}.{}".format, st.integers(1, 3), st.integers(0, 1)
).map(LeaseId)  # fmt: skip
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Join, NAMES, st.just("i")),
    st.builds(Heartbeat, NAMES, st.integers(1, 2)),
    st.builds(Heartbeat, NAMES, st.just(1)),
    st.builds(Offer, st.just("p"), STAMPS, st.integers(8, 30)),
    st.builds(Recall, st.just("p"), STAMPS, st.integers(1, 9), st.just(3.0)),
    st.builds(Observe, st.just("p"), STAMPS, st.integers(0, 9)),
    st.builds(
        Request, st.just("c"), st.just(1), st.integers(1, 3),
        st.lists(st.builds(Shard, st.integers(1, 5)), min_size=1, max_size=2).map(tuple),
    ),
    st.builds(
        Report, st.just("c"), LEASE_IDS, STAMPS,
        st.sampled_from([LeaseEvent.HOLD, LeaseEvent.REFUSE, LeaseEvent.RELEASE]),
    ),
    st.builds(Leave, st.just("c"), st.integers(1, 2)),
)  # fmt: skip
BATCHES = st.lists(st.lists(MESSAGES, min_size=1, max_size=12), max_size=4)


def book_with_an_offer() -> LeaseBook:
    book = LeaseBook(10.0, 0.0, limits=LIMITS)
    book.handle_all([Join("p", "i"), Join("c", "i"), Offer("p", Stamp(1, 1), 30)], 0.0)
    return book


@settings(max_examples=examples(60))
@given(batches=BATCHES)
def test_a_batch_does_what_its_messages_do_one_by_one(batches: list[list[Message]]) -> None:
    """Except copies of a request within a batch: each gets the answer of the first one."""
    together, apart = book_with_an_offer(), book_with_an_offer()
    for now, batch in enumerate(batches):
        replies = together.handle_all(batch, float(now))
        granted = set[tuple[str, int, int]]()
        for message, reply in zip(batch, replies, strict=True):
            single = apart.handle(message, float(now))
            key = (message.name, message.generation, message.number) if isinstance(message, Request) else ("", 0, 0)
            assert key in granted or (reply.outcome, reply.member) == (single.outcome, single.member)
            granted |= {key} if isinstance(message, Request) and reply.outcome is Outcome.APPLIED else set()
        together.rows.check_integrity()
        assert (together.rows.members, together.rows.leases) == (apart.rows.members, apart.rows.leases)
        assert together.due_in_s(now).keys() == apart.due_in_s(now).keys()


@settings(max_examples=examples(60))
@given(batches=BATCHES)
def test_a_heartbeat_in_a_batch_returns_the_leases_after_the_batch(batches: list[list[Message]]) -> None:
    book, side = book_with_an_offer(), MemberSide("c", "i", 10.0)
    for now, batch in enumerate(batches, 1):
        lives_on = [message for message in batch if not isinstance(message, Leave)]
        batch = [Join("c", "i"), *lives_on]
        replies = book.handle_all(batch, float(now))
        for message, reply in zip(batch, replies, strict=True):
            if message.name == "c":
                side.learn(message, reply, now - 0.5, now)
        known = {lease_id: known.lease for lease_id, known in side.known.items()}
        assert known == {lease.lease_id: lease for lease in book.roster.leases_of("c")}
        lists = {id(reply.leases) for reply, message in zip(replies, batch, strict=True) if isinstance(message, Join)}
        assert len(lists) <= 2  # one for each member
