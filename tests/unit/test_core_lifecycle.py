"""Latencies of requests, and their stays on the device."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.lifecycle import EventKind, Lifecycle, residence_s


def story(arrival_s: float, events: list[tuple[float, EventKind]], token_times_s: list[float]) -> Lifecycle:
    lifecycle = Lifecycle(arrival_s)
    for now, kind in events:
        lifecycle.record(kind, now)
    lifecycle.token_times_s.extend(token_times_s)
    return lifecycle


def test_a_request_that_runs_undisturbed() -> None:
    request = story(10.0, [(10.5, EventKind.SCHEDULED), (13.0, EventKind.FINISHED)], [11.0, 11.5, 12.5, 13.0])
    assert request.queueing_delay_s == 0.5
    assert request.ttft_s == 1.0
    assert request.itl_s == [0.5, 1.0, 0.5]
    assert request.tpot_s == pytest.approx((13.0 - 11.0) / 3)
    assert request.e2e_s == 3.0


def test_a_request_that_is_preempted_pays_in_one_gap() -> None:
    """Queueing delay ends with the first scheduling; the second does not count."""
    events = [
        (12.0, EventKind.SCHEDULED),
        (13.5, EventKind.PREEMPTED),
        (16.0, EventKind.SCHEDULED),
        (18.0, EventKind.FINISHED),
    ]
    request = story(10.0, events, [13.0, 17.0, 18.0])
    assert request.queueing_delay_s == 2.0
    assert request.ttft_s == 3.0
    assert request.itl_s == [4.0, 1.0]
    assert request.tpot_s == 2.5
    assert request.e2e_s == 8.0
    assert request.inference_s == 6.0
    assert request.first(EventKind.SCHEDULED) == 12.0
    assert request.first(EventKind.SWAPPED_IN) is None


def test_a_request_that_is_aborted_before_its_first_token() -> None:
    request = story(10.0, [(11.0, EventKind.FINISHED)], [])
    assert request.queueing_delay_s is None
    assert request.ttft_s is None
    assert request.tpot_s is None
    assert request.e2e_s is None
    assert request.itl_s == []
    assert request.events == [(10.0, EventKind.ARRIVED), (11.0, EventKind.FINISHED)]


def test_one_token_has_a_ttft_but_no_tpot() -> None:
    request = story(1.0, [], [2.0])
    assert (request.ttft_s, request.tpot_s, request.e2e_s, request.itl_s) == (1.0, None, 1.0, [])


COMES = (EventKind.SCHEDULED, EventKind.SWAPPED_IN)
GAPS_S = st.floats(0.0, 10.0, allow_subnormal=False)


@st.composite
def stories(draw: st.DrawFn) -> Lifecycle:
    """A request that is scheduled and preempted at random, and finishes on or off the device."""
    now = draw(GAPS_S)
    request = Lifecycle(now)
    for turn in range(draw(st.integers(0, 12))):
        kind = EventKind.PREEMPTED if turn % 2 else draw(st.sampled_from(COMES))
        now += draw(GAPS_S)
        request.record(kind, now)
    request.record(EventKind.FINISHED, now + draw(GAPS_S))
    return request


def is_on_device(request: Lifecycle, when_s: float) -> bool:
    """Whether the last event so far put it on the device."""
    *_, last = (kind for now, kind in request.events if now <= when_s)
    return last in COMES


@given(stories())
def test_stays_are_disjoint_in_order_and_within_the_life(request_: Lifecycle) -> None:
    stays = residence_s(request_)
    finished_s = request_.first(EventKind.FINISHED)
    assert finished_s is not None
    edges = [request_.arrival_s, *(edge for stay in stays for edge in stay), finished_s]
    assert edges == sorted(edges)
    assert all(begin < end for begin, end in stays)


@given(stories())
def test_stays_are_exactly_the_times_on_the_device(request_: Lifecycle) -> None:
    stays = residence_s(request_)
    for (before, _), (after, _) in pairwise(request_.events):
        middle = (before + after) / 2
        if before < middle < after:
            assert any(begin < middle < end for begin, end in stays) == is_on_device(request_, middle)


def test_a_stay_that_has_not_ended_is_left_out() -> None:
    coming = [(1.0, EventKind.SCHEDULED), (2.0, EventKind.PREEMPTED), (4.0, EventKind.SWAPPED_IN)]
    assert residence_s(story(0.0, coming, [])) == [(1.0, 2.0)]


@pytest.mark.parametrize("kinds", [COMES, COMES[::-1], (EventKind.PREEMPTED,)])
def test_impossible_moves_are_broken_invariants(kinds: tuple[EventKind, ...]) -> None:
    with pytest.raises(InvariantError):
        residence_s(story(0.0, [(float(i + 1), kind) for i, kind in enumerate(kinds)], []))
