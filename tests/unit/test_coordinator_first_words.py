"""After a takeover, no bytes of an offer are granted before its lender has confirmed the offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from floodplain.coordinator.service import LeaseService
from floodplain.leases.messages import Heartbeat, Join, Message, Offer, Recall, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseState, Outcome, Stamp
from tests.support.hooked_store import HookedStore

TTL_S = 10.0
ASK = Request("c", 1, 1, (Shard(4),))
APPLIED, DEFERRED, STALE = Outcome.APPLIED, Outcome.DEFERRED, Outcome.STALE


class Pair:
    """Two coordinators on one store. The first leads; a lender of eight bytes and a consumer have joined."""

    def __init__(self, store: HookedStore) -> None:
        self.now = 100.0
        self.services = [LeaseService(store, f"http://{n}", TTL_S, lambda: self.now) for n in range(2)]
        self.leader = self.services[0]
        self.leader.tick()
        assert self.say(Join("p", "p-1"), Join("c", "c-1"), Offer("p", Stamp(1, 1), 8)) == [APPLIED] * 3

    def take_over(self) -> None:
        """Let the second coordinator lead: it sees no beat of the first for long enough."""
        self.leader = self.services[1]
        for _ in range(5):
            self.leader.tick()
            self.now += 1.0
            self.leader.tick()
        assert self.leader.is_leading

    def say(self, *messages: Message) -> list[Outcome]:
        """The outcomes of a batch."""
        return self.say_at_once(messages)[0]

    def say_at_once(self, *batches: tuple[Message, ...]) -> list[list[Outcome]]:
        """The outcomes of batches in one transaction."""
        answers = self.leader.serve([self.leader.handle(batch) for batch in batches])
        return [[reply.outcome for reply in replies] for replies in answers]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with closing(HookedStore.open(f"sqlite:///{tmp_path / 'leases.db'}")) as store:
        yield Pair(store)


def test_an_offer_is_granted_when_its_lender_beats_and_not_before(pair: Pair) -> None:
    pair.take_over()
    assert pair.say(Heartbeat("c", 1), ASK) == [APPLIED, DEFERRED]
    assert pair.say_at_once((ASK,), (Heartbeat("p", 1),), (ASK,)) == [[DEFERRED], [APPLIED], [APPLIED]]


def test_nothing_is_granted_of_what_was_withdrawn_meanwhile(pair: Pair) -> None:
    """Requests come in the same transaction: before, after and within the lender's batch."""
    pair.take_over()
    batch = (Heartbeat("p", 1), ASK, Recall("p", Stamp(1, 2), 8, deadline_s=1.0), ASK)
    answers = pair.say_at_once((ASK,), batch, (ASK,), (Heartbeat("p", 1),), (ASK,))
    assert answers == [[DEFERRED], [APPLIED, DEFERRED, APPLIED, DEFERRED], [DEFERRED], [APPLIED], [DEFERRED]]


def test_a_lender_whose_withdrawal_is_stale_sends_it_again_first(pair: Pair) -> None:
    pair.take_over()
    late, now = (Recall("p", Stamp(1, revision), 8, deadline_s=1.0) for revision in (1, 2))
    answers = pair.say_at_once((Heartbeat("p", 1), late), (ASK,), (Heartbeat("p", 1), now), (ASK,))
    assert answers == [[APPLIED, STALE], [DEFERRED], [APPLIED, APPLIED], [DEFERRED]]


def test_a_process_that_follows_a_lender_confirms_no_offer_of_it(pair: Pair) -> None:
    pair.take_over()
    assert pair.say(Join("p", "p-2"), ASK) == [DEFERRED, DEFERRED]
    for _ in range(30):
        pair.now += 0.5
        pair.leader.tick()
        pair.say(Heartbeat("c", 1))
    assert pair.say(Join("p", "p-2"), ASK) == [APPLIED, DEFERRED]


def test_a_join_of_a_lender_makes_its_offers_grantable(pair: Pair) -> None:
    assert pair.say(Join("q", "q-1"), Offer("q", Stamp(1, 1), 9), ASK) == [APPLIED] * 3
    (rows,) = pair.leader.serve([lambda book, now: list(book.rows.leases.values())])
    assert [(lease.producer, lease.state) for lease in rows] == [("q", LeaseState.GRANTED)]
