"""Served work: weights, lift at arrival and on return from idle, and totals that lose no work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.served import MAX_PRIORITY, PROMPT_WEIGHT, KeyAccounts, weight_of, weighted_work
from tests.support.examples import examples


def test_one_step_of_priority_is_a_quarter_more_or_less() -> None:
    assert weight_of(0) == 1.0
    assert weight_of(-1) / weight_of(0) == weight_of(3) / weight_of(4) == 1.25
    assert weighted_work(0, 100, -1) == 80


def test_no_priority_weighs_more_than_the_last_step() -> None:
    assert weight_of(-MAX_PRIORITY - 1000) == weight_of(-MAX_PRIORITY)
    assert weight_of(MAX_PRIORITY + 1000) == weight_of(MAX_PRIORITY) > 0


def test_a_token_of_a_prompt_counts_half() -> None:
    assert weighted_work(10, 3, 0) == 10 * PROMPT_WEIGHT + 3 == 8


def test_a_new_key_begins_at_the_least_that_any_active_one_was_given() -> None:
    accounts = KeyAccounts()
    accounts.arrive("a", [])
    accounts.arrive("b", [("a", 30.0)])
    assert accounts.credits["b"] == 30.0
    accounts.arrive("c", [("a", 70.0), ("b", 12.0)])  # b: 30 by lift and 12 of its own
    assert accounts.credits["c"] == 42.0


@pytest.mark.parametrize(("given", "credit"), [(5.0, 200.0), (500.0, 500.0)])
def test_being_away_neither_saves_work_up_nor_wipes_it_out(given: float, credit: float) -> None:
    accounts = KeyAccounts()
    accounts.arrive("a", [])
    accounts.arrive("b", [])
    accounts.depart("b", given)
    accounts.arrive("b", [("a", 200.0)])
    assert accounts.credits["b"] == credit


def test_when_no_key_is_active_credits_start_anew() -> None:
    accounts = KeyAccounts()
    accounts.arrive("a", [])
    accounts.arrive("b", [])
    accounts.depart("b", 500.0)
    accounts.depart("a", 3.0)
    accounts.arrive("b", [])
    assert accounts.credits == {"b": 0.0}


def test_what_a_view_was_given_does_not_change_any_more() -> None:
    accounts = KeyAccounts()
    accounts.arrive("a", [])
    shown = accounts.credits
    accounts.arrive("b", [("a", 7.0)])
    accounts.depart("a", 9.0)
    assert shown == {"a": 0.0}


EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 50)), max_size=40)


@settings(max_examples=examples(40))
@given(EVENTS)
def test_a_keys_total_is_its_lifts_and_all_that_its_requests_were_given(events: list[tuple[str, bool, int]]) -> None:
    """Compared with plain sums. An arriving key starts at no less than the least active one."""
    accounts = KeyAccounts()
    live: dict[str, list[float]] = {key: [] for key in "abc"}
    totals: dict[str, float] = {}
    for key, is_arrival, work in events:
        if not is_arrival and live[key]:
            given_work = live[key].pop() + work
            totals[key] += work
            accounts.depart(key, given_work)
            if not any(live.values()):
                totals.clear()
        elif is_arrival:
            active = {other: totals[other] for other in "abc" if live[other]}
            accounts.arrive(key, [(other, one) for other in "abc" for one in live[other]])
            if key not in active:
                totals[key] = max(totals.get(key, 0.0), min(active.values(), default=0.0))
            live[key].append(float(work))
            totals[key] += work
        assert accounts.credits.keys() == {other for other in "abc" if live[other]}
        for other in accounts.credits:
            assert accounts.credits[other] + sum(live[other]) == pytest.approx(totals[other])


# -- places in line --------------------------------------------------------------------------------------------------


def line(accounts: KeyAccounts, clients: str, priority: int = 0) -> list[str]:
    """Keys in the order of their places, after all requests have arrived."""
    places = [(accounts.take_place(client, priority), number) for number, client in enumerate(clients)]
    return [clients[number] for _, number in sorted(places)]


def test_in_line_keys_alternate_however_many_each_has_there() -> None:
    assert line(KeyAccounts(), "aaaaabbc") == [*"abcabaaa"]


def test_a_new_key_stands_behind_begun_requests_not_waiting_ones() -> None:
    accounts = KeyAccounts()
    line(accounts, 500 * "a")
    accounts.leave_line(7.0)  # a's eighth has begun
    assert accounts.take_place("b", 0) == 7.0
    assert accounts.take_place("b", 0) == 8.0


def test_weight_brings_a_keys_requests_closer_together() -> None:
    accounts = KeyAccounts()
    places = [accounts.take_place("a", -3) for _ in range(4)]
    assert places == pytest.approx([number / 1.25**3 for number in range(4)])


def test_when_all_have_gone_the_line_begins_anew() -> None:
    accounts = KeyAccounts()
    accounts.arrive("a", [])
    accounts.take_place("a", 0)
    accounts.leave_line(9.0)
    accounts.depart("a", 5.0)
    assert accounts.take_place("a", 0) == 0.0
