"""Which lever relieves an overload: prices against a numerical integration, and bounds of every choice."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.relief.ways import TurnCost
from floodplain.policy.relief import (
    CALM_PART,
    LEAST_GAIN,
    MEMORY,
    MOST_S,
    TURN_LIMIT,
    TURNS,
    DropCost,
    Lever,
    Offer,
    Overload,
    ReliefReason,
    StreamStep,
    choose_relief,
    exchanged_bytes,
    expect_s,
    token_seconds,
)
from tests.support.examples import examples

RATES = st.floats(0, 3000)
OVERLOADS = st.builds(
    Overload,
    waiting_tokens=st.floats(0, 50_000),
    resident_tokens=st.floats(0, 20_000),
    arriving_tokens_per_s=RATES,
    later_tokens_per_s=RATES,
    lasts_s=st.floats(0, 400),
)
OFFERS = st.builds(
    Offer,
    lever=st.sampled_from(Lever),
    tokens_per_s=st.floats(1, 3000),
    pause_s=st.floats(0, 20),
    undo_s=st.floats(0, 5),
)
CHOICES = st.lists(OFFERS, max_size=6, unique_by=lambda offer: offer.lever).map(
    lambda offers: [*(offer for offer in offers if offer.lever is not Lever.WAIT), Offer(Lever.WAIT, 1000.0)]
)
STEPS = st.builds(StreamStep, st.floats(0, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-3))


def integrate(overload: Overload, offer: Offer, step_s: float) -> float:
    """Integrate the price in small steps, each with the rates at its middle."""
    waiting, area = overload.waiting_tokens, 0.0
    for index in range(round(MOST_S / step_s)):
        now = (index + 0.5) * step_s
        arriving = overload.arriving_tokens_per_s if now < overload.lasts_s else overload.later_tokens_per_s
        after = max(0.0, waiting + (arriving - (offer.tokens_per_s if now >= offer.pause_s else 0.0)) * step_s)
        area += (waiting + after) / 2 * step_s
        waiting = after
    return area + offer.undo_s * CALM_PART * overload.resident_tokens


@settings(max_examples=examples(25))
@given(overload=OVERLOADS, offer=OFFERS)
def test_the_price_is_the_area_under_what_waits(overload: Overload, offer: Offer) -> None:
    assert token_seconds(overload, offer) == pytest.approx(integrate(overload, offer, 0.1), rel=0.02, abs=2000)


@given(overload=OVERLOADS, offer=OFFERS, more=st.floats(0, 500))
def test_a_faster_lever_is_no_dearer_and_a_longer_pause_no_cheaper(
    overload: Overload, offer: Offer, more: float
) -> None:
    price = token_seconds(overload, offer)
    near = price * (1 + 1e-9) + 1e-6
    assert token_seconds(overload, replace(offer, tokens_per_s=offer.tokens_per_s + more)) <= near
    assert token_seconds(overload, replace(offer, pause_s=offer.pause_s + more / 10)) * (1 + 1e-9) + 1e-6 >= price


@given(overload=OVERLOADS, offers=CHOICES, dice=st.randoms())
def test_the_choice_keeps_its_bounds_and_ignores_order(overload: Overload, offers: list[Offer], dice: Random) -> None:
    decision = choose_relief(overload, offers)
    prices, lever = decision.prices, decision.lever
    assert lever in prices
    turn = min((prices[one] for one in TURNS if one in prices), default=float("inf"))
    memory = min((prices[one] for one in MEMORY if one in prices), default=float("inf"))
    plain = turn if turn <= TURN_LIMIT * prices[Lever.WAIT] else prices[Lever.WAIT]
    if overload.waiting_tokens == 0:
        assert lever is Lever.WAIT and decision.reason is ReliefReason.NOTHING_WAITS
    elif lever in MEMORY:
        assert prices[lever] == memory and LEAST_GAIN * memory <= plain
        assert prices[lever] <= TURN_LIMIT / LEAST_GAIN * prices[Lever.WAIT]
    else:
        assert LEAST_GAIN * memory > plain and prices[lever] == plain
    dice.shuffle(offers)
    assert choose_relief(overload, offers).lever is lever


def offers_for(step: StreamStep, num_streams: float, grown: float, pause_s: float) -> list[Offer]:
    """Offers of two instances that wait, take turns over a fast link, or make room for ``grown`` times the streams."""
    rate = 2 * step.tokens_per_s(num_streams)
    pipelined = step.pipeline_tokens_per_s(2 * num_streams * grown, 2)
    return [Offer(Lever.WAIT, rate), Offer(Lever.HOST, rate), Offer(Lever.DROP, pipelined, pause_s, pause_s)]


def burst(rate: float, factor: float, lasts_s: float) -> Overload:
    return Overload(2 * rate, 4 * rate, factor * rate, 0.5 * rate, lasts_s)


WIDE, BOUND = StreamStep(0.03, 0.0005), StreamStep(0.001, 0.005)
"""Steps with a large base cost; and with nearly none."""


def test_drop_wins_in_bursts_that_outlast_its_pause() -> None:
    offers = offers_for(WIDE, 24, 2.0, pause_s=1.0)
    levers = [choose_relief(burst(offers[0].tokens_per_s, 4, lasts_s), offers).lever for lasts_s in (0.1, 30, 60)]
    assert levers == [Lever.HOST, Lever.DROP, Lever.DROP]


def test_without_its_pause_drop_would_win_at_once() -> None:
    offers = offers_for(WIDE, 24, 2.0, pause_s=0.0)
    assert choose_relief(burst(offers[0].tokens_per_s, 4, 0.1), offers).lever is Lever.DROP


@pytest.mark.parametrize("lasts_s", [1, 10, 60, 300])
def test_where_compute_is_the_bound_no_memory_helps(lasts_s: float) -> None:
    offers = offers_for(BOUND, 24, 3.0, pause_s=0.5)
    assert choose_relief(burst(offers[0].tokens_per_s, 3, lasts_s), offers).lever is Lever.HOST


def test_turns_that_cost_too_much_are_not_taken() -> None:
    overload = burst(1000.0, 2, 20)
    for cost, lever in ((0.99, Lever.HOST), (0.5, Lever.WAIT)):
        assert choose_relief(overload, [Offer(Lever.WAIT, 1000.0), Offer(Lever.HOST, 1000.0 * cost)]).lever is lever


def test_of_turns_that_cost_the_same_those_over_the_faster_link_are_taken() -> None:
    offers = [Offer(lever, 1000.0) for lever in (Lever.PEER, Lever.WAIT, Lever.RECOMPUTE, Lever.HOST)]
    assert choose_relief(burst(1000.0, 2, 20), offers).lever is Lever.PEER


def test_an_overload_is_expected_to_last_as_long_again() -> None:
    assert expect_s(7.0) == 7.0 and expect_s(0.0) == 1.0


# -- rates -------------------------------------------------------------------------------------------------------------


@given(step=STEPS, num_streams=st.floats(1, 500), stages=st.integers(1, 4))
def test_a_pipeline_is_as_fast_as_replicas_but_for_hops_and_bubbles(
    step: StreamStep, num_streams: float, stages: int
) -> None:
    replicas = stages * step.tokens_per_s(num_streams)
    assert step.pipeline_tokens_per_s(stages * num_streams, stages, bubble=0.0) == pytest.approx(replicas)
    assert step.pipeline_tokens_per_s(stages * num_streams, stages, hop_s=0.001) < replicas * (1 + 1e-9)


@given(step=STEPS, num_streams=st.floats(1, 500), turning=st.floats(0, 1), bandwidth=st.floats(1e3, 1e12))
def test_turns_never_make_more_tokens_and_a_fast_link_loses_none(
    step: StreamStep, num_streams: float, turning: float, bandwidth: float
) -> None:
    cost, plain = TurnCost(1e6, 300, 16, turning), step.tokens_per_s(num_streams)
    slow = cost.swap_tokens_per_s(plain, bandwidth)
    assert plain * (1 - turning) * (1 - 1e-9) <= slow <= plain * (1 + 1e-9)
    assert cost.swap_tokens_per_s(plain, 1e15) == pytest.approx(plain)
    assert cost.recompute_tokens_per_s(step, num_streams) <= plain * (1 + 1e-9)


def test_a_drop_pauses_for_its_pages_and_half_of_its_exchange() -> None:
    cost = DropCost(remap_s=0.2, exchange_bytes=exchanged_bytes(4e9, 4), bandwidth=1e9)
    assert cost.exchange_s == pytest.approx(3.0) and cost.pause_s == pytest.approx(1.7)
