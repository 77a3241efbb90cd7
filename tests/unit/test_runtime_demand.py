"""Demand, learned from requests that arrive and end."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.runtime.demand import NUM_RECENT, RATE_S, DemandMeter, Recent, mean_length

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


@given(ended=LENGTHS.filter(bool))
def test_without_live_streams_it_is_the_mean(ended: list[int]) -> None:
    assert mean_length(sorted(ended), []) == pytest.approx(mean(ended))


@given(ended=LENGTHS, live=LENGTHS)
def test_it_is_the_area_under_the_product_limit_curve(ended: list[int], live: list[int]) -> None:
    """The oracle, token by token: the share of requests with n tokens that continue."""
    area, surviving = 0.0, 1.0
    for number in range(max([*ended, *live], default=0)):
        area += surviving
        at_risk = sum(one > number for one in (*ended, *live))
        num_ended = ended.count(number + 1)
        surviving *= 1 - num_ended / at_risk if at_risk else 1.0
    assert mean_length(sorted(ended), sorted(live)) == pytest.approx(area)


def test_the_short_ones_that_end_first_do_not_halve_it() -> None:
    """Half of the answers ended at 10 tokens; the others have 60 and go on."""
    assert mean_length([10] * 20, [60] * 20) == pytest.approx(35.0)
    assert mean([10] * 20) == 10  # control: the mean of ended answers alone


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 7))
def test_recent_numbers_are_the_last_ones_in_order(numbers: list[int], size: int) -> None:
    recent = Recent(size)
    for number in numbers:
        recent.add(number)
    assert recent.sorted == sorted(numbers[-size:])


def ended(meter: DemandMeter, *outputs: int, num_waiting: int = 1, num_paused: int = 0) -> None:
    meter.learn(0.1, 20, outputs, num_waiting, num_paused)


def test_requests_end_at_the_rate_of_tokens_over_their_mean_number() -> None:
    meter = DemandMeter()
    for _ in range(100):
        ended(meter, 40)
    meter.arrive(7, 1, 0, [])
    assert meter.now.mean_output == pytest.approx(40)
    assert meter.now.end_rate == pytest.approx(200 / 40)
    assert (meter.now.median_prompt, meter.now.step_s) == (7, pytest.approx(0.1))


def test_the_rate_is_learned_only_while_not_all_fit() -> None:
    meter = DemandMeter()
    ended(meter, 40)
    for _ in range(100):
        meter.learn(0.1, 1, (), 0, 0)
    meter.arrive(7, 1, 0, [])
    assert meter.now.end_rate == pytest.approx(200 / 40)
    for _ in range(round(10 * RATE_S / 0.1)):
        meter.learn(0.1, 1, (), 1, 0)
    assert meter.now.end_rate == pytest.approx(10 / 40, rel=0.01)


def test_the_longest_wait_is_kept_until_no_request_waits() -> None:
    meter = DemandMeter()
    ended(meter, 40)
    meter.arrive(7, 1, 0, [])  # it does not wait
    assert meter.now.longest_wait_s == 0.0
    meter.arrive(7, 11, 6, [])  # ten before it, and half of the work of six
    assert meter.now.longest_wait_s == pytest.approx(13 / 5)
    meter.arrive(7, 3, 0, [])
    ended(meter, num_waiting=0, num_paused=1)
    assert meter.now.longest_wait_s == pytest.approx(13 / 5)
    ended(meter, num_waiting=0)
    assert meter.now.longest_wait_s == 0.0


def test_old_requests_are_forgotten() -> None:
    meter = DemandMeter()
    for number in (1000, 10):
        for _ in range(NUM_RECENT):
            ended(meter, number)
            meter.arrive(number, 1, 0, [])
    assert (meter.now.mean_output, meter.now.median_prompt) == (pytest.approx(10), 10)
