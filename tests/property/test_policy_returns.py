"""The worth of KV between a session's requests, against sums over all times for which it could be kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from floodplain.policy.returns import EDGES_S, NUM_BINS, GapCounts, bin_of, chance_of_return, expected_stay_s, worth

HAZARDS = st.lists(st.floats(0.0, 1.0), min_size=NUM_BINS, max_size=NUM_BINS)


def gains(hazards: list[float], price: float) -> list[float]:
    """Expected returns less the price of a slot, of KV that is kept until each edge."""
    survival, sums = 1.0, [0.0]
    for index, hazard in enumerate(hazards):
        sums.append(sums[-1] + survival * (hazard - price * expected_stay_s(hazard, index)))
        survival *= 1 - hazard
    return sums


def end_of_pin(hazards: list[float], price: float) -> int:
    """The edge at which a pin ends: its worth is at most the price from then on."""
    return next((index for index in range(NUM_BINS) if worth(hazards, index) <= price), NUM_BINS)


@given(HAZARDS, st.floats(1e-6, 4.0))
def test_no_time_to_live_has_a_higher_gain(hazards: list[float], price: float) -> None:
    sums = gains(hazards, price)
    assert sums[end_of_pin(hazards, price)] == approx(max(sums), abs=1e-9)


@given(HAZARDS, st.floats(1e-6, 4.0), st.floats(1.0, 10.0))
def test_a_higher_price_never_keeps_for_longer(hazards: list[float], price: float, factor: float) -> None:
    assert end_of_pin(hazards, price * factor) <= end_of_pin(hazards, price)


@given(HAZARDS)
def test_the_chance_of_return_is_the_sum_over_bins(hazards: list[float]) -> None:
    survival, chance = 1.0, 0.0
    for hazard in hazards:
        chance += survival * hazard
        survival *= 1 - hazard
    assert chance_of_return(hazards) == approx(chance, abs=1e-9)


@given(st.lists(st.integers(0, NUM_BINS), max_size=60))
def test_hazards_are_the_parts_of_gaps_that_end(ends: list[int]) -> None:
    counts = GapCounts(10**6)
    for end in ends:
        for index in range(end):
            counts.add_outlasted(index)
        counts.add_end(end)
    for index, hazard in enumerate(counts.hazards([0.0] * NUM_BINS)):
        reached = sum(end >= index for end in ends)
        assert hazard == approx(ends.count(index) / (reached + 2.0))


@given(st.floats(0.0, 1e5))
def test_a_gap_lies_in_its_bin(gap_s: float) -> None:
    index = bin_of(gap_s)
    assert EDGES_S[index] <= gap_s and (index == NUM_BINS or gap_s < EDGES_S[index + 1])


def test_newer_gaps_outweigh_older_ones() -> None:
    counts = GapCounts(16)
    for _ in range(100):
        counts.add_outlasted(0)
    for _ in range(32):
        counts.add_end(0)
    assert counts.hazards()[0] > 0.7


def test_nothing_is_worth_a_slot_beyond_the_last_bin() -> None:
    assert worth([1.0] * NUM_BINS, NUM_BINS) == 0
