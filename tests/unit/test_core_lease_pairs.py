"""Pairs that a placement allows: only they are granted leases, and leases of other pairs are recalled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from floodplain.leases.choice import allows, choose_disallowed
from floodplain.leases.messages import Heartbeat
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome
from tests.support.lease_pair import LeasePair

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
        assert is_allowed == allows(pairs, each.consumer, each.producer)
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


def test_leases_that_a_new_placement_allows_are_left_alone() -> None:
    pair = LeasePair()
    [granted] = pair.grant(1, 6)
    for pairs in ({"c": ["q", "p"]}, None):
        assert pair.book.allow(pairs, pair.now, 5.0) == []
    assert pair.book.rows.leases[granted.lease_id] == granted
