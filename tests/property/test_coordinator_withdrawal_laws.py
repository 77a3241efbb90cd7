"""What is granted of an offer that changes while its coordinator exits, restarts, and answers late.

Law: after a grant, consumers count on at most the bytes that the lender wanted to lend in its newest batch that this
coordinator received. A batch with a stale change does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from floodplain.coordinator.service import LeaseService
from floodplain.leases import book
from floodplain.leases.book import Roster
from floodplain.leases.member import Lender
from floodplain.leases.messages import Join, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseState, Outcome, Stamp
from floodplain.lending.membership import LentDevice, Membership
from tests.support.controls import Broken, Controls, Fault
from tests.support.examples import examples
from tests.support.hooked_store import HookedStore

TTL_S = 3600.0
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.sampled_from([0, 2, 4])),
        st.tuples(st.sampled_from(["speak", "ask", "lose answer"]), st.just(0)),
        st.tuples(st.sampled_from(["lose words", "say late", "arrive"]), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=30,
)
Steps = list[tuple[str, int]]


class Words(NamedTuple):
    """A batch of the lender: its number, and the bytes that the lender wanted to lend when it was sent."""

    number: int
    wish: int


class Shop:
    """A service on a store, a real membership that lends, and a consumer that sends every report it may.

    Attributes:
        num_granted: Number of grants.
    """

    def __init__(self, store: HookedStore) -> None:
        self._store, self._now, self._wish = store, 100.0, 0
        self.num_granted = 0
        self._late: list[tuple[Sequence[Message], Words]] = []
        self._heard = self._said = Words(0, 0)
        store.clear()
        self._lead()
        device = LentDevice(capacity_bytes=16, foreign_bytes=lambda: 16)
        self._lender = Membership("p", "p-1", device, lambda: self._now)
        self._say(Join("c", "c-1"))
        self.step("speak", 0)

    def step(self, what: str, number: int) -> None:
        """Execute one event."""
        self._now += 0.1
        match what:
            case "want":
                self._wish = 4 * number
                self._lender.lend(self._wish)
            case "speak" | "lose answer":
                messages, sent_s = self._lender.collect()
                replies = self._hear(messages, self._words())
                if what == "speak":
                    self._lender.learn(messages, replies, TTL_S, sent_s)
            case "lose words":
                self._lender.collect()
            case "say late":
                self._late.append((self._lender.collect()[0], self._words()))
            case "arrive" if self._late:
                self._hear(*self._late.pop(0))
            case "ask":
                self._ask()
            case "report":
                self._report(number)
            case "restart":
                self._service.resign()
                self._late.clear()  # their connections ended with that coordinator
                self._lead()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        self._service = LeaseService(self._store, "http://me", TTL_S, lambda: self._now)
        self._service.tick()
        self._heard = Words(0, 0)

    def _say(self, *messages: Message) -> list[Reply]:
        self._service.tick()
        (replies,) = self._service.serve([self._service.handle(messages)])
        assert isinstance(replies, list), replies
        return replies

    def _words(self) -> Words:
        """Return the number and wish of a batch that was just collected."""
        self._said = Words(self._said.number + 1, self._wish)
        return self._said

    def _hear(self, messages: Sequence[Message], words: Words) -> list[Reply]:
        replies = self._say(*messages)
        changes = [r.outcome for m, r in zip(messages, replies, strict=True) if isinstance(m, Offer | Recall)]
        if all(outcome is Outcome.APPLIED for outcome in changes):
            self._heard = max(self._heard, words)
        return replies

    def _leases(self) -> list[Lease]:
        return sorted(self._store.rows()[1].values(), key=lambda lease: lease.lease_id)

    def _ask(self) -> None:
        row = self._store.rows()[0]["c"]
        [reply] = self._say(Request("c", row.generation, row.last_request + 1, (Shard(4, "p"),)))
        if reply.outcome is Outcome.APPLIED:
            self.num_granted += 1
            states = (LeaseState.GRANTED, LeaseState.HELD)
            counted_on = sum(lease.num_bytes for lease in self._leases() if lease.state in states)
            assert counted_on <= self._heard.wish, f"{counted_on} bytes are lent: it wanted {self._heard.wish}"

    def _report(self, number: int) -> None:
        """Send the consumer's next allowed report of a lease; an owed lease is observed as free by the lender."""
        leases = self._leases()
        if not leases:
            return
        lease = leases[number % len(leases)]
        if lease.is_owed:
            self._say(Observe("p", self._store.rows()[0]["p"].stamp, 0))
            return
        event = LeaseEvent.HOLD if lease.allows(LeaseEvent.HOLD) else LeaseEvent.RELEASE
        self._say(Report("c", lease.lease_id, Stamp(lease.generation, lease.revision), event))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HookedStore]:
    with closing(HookedStore.open(f"sqlite:///{tmp_path / 'leases.db'}")) as opened:
        yield opened


def drive(store: HookedStore, steps: Steps) -> Shop:
    shop = Shop(store)
    for what, number in steps:
        shop.step(what, number)
    return shop


@pytest.mark.slow
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_no_more_is_granted_than_the_lenders_last_message_allows(store: HookedStore, steps: Steps) -> None:
    drive(store, steps)


LENT = [("want", 4), ("speak", 0), ("ask", 0)]
WITHDRAWN_WHILE_DOWN = [*LENT, ("want", 0), ("restart", 0), ("ask", 0), ("speak", 0), ("ask", 0)]
RECALL_IS_STALE = [*LENT, *((what, 0) for what in ("restart", "report", "want", "speak", "ask", "speak", "ask"))]
ANSWER_TO_OFFER_IS_LOST = [
    ("want", 4), ("lose answer", 0), ("want", 0), ("restart", 0), ("speak", 0), ("ask", 0), ("speak", 0), ("ask", 0),
]  # fmt: skip
CONTROLS = Controls()


@CONTROLS.breaks(Roster, "__init__", WITHDRAWN_WHILE_DOWN)
def all_that_live_were_heard(original: Broken, roster: Roster, *args: object) -> None:
    original(roster, *args)
    roster.heard.update(roster.living)


@CONTROLS.breaks(book, "_confirms_offer", RECALL_IS_STALE)
def any_heartbeat_confirms_offers(original: Broken, *about: object) -> bool:
    return original(*about[:-1], ())


@CONTROLS.breaks(Lender, "say", ANSWER_TO_OFFER_IS_LOST)
def offers_under_way_are_left_alone(original: Broken, lender: Lender, *seen: int) -> Recall | Observe | Offer | None:
    said, row = original(lender, *seen), lender.member.row
    is_copy = isinstance(said, Offer) and row is not None and said.offered_bytes <= row.offered_bytes
    return None if is_copy else said


@pytest.mark.parametrize(("fault", "steps"), CONTROLS)
def test_a_broken_rule_is_seen(fault: Fault, steps: Steps, store: HookedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    drive(store, steps)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="bytes are lent"):
        drive(store, steps)


def test_bytes_are_granted_again_after_a_message_of_the_lender(store: HookedStore) -> None:
    shop = drive(store, [*LENT, ("restart", 0), ("ask", 0)])
    assert shop.num_granted == 1
    for what in ("speak", "ask"):
        shop.step(what, 0)
    assert shop.num_granted == 2
