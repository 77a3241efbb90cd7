"""Latencies by hand, on three requests of one small story."""

from __future__ import annotations

import pytest

from floodplain.core.lifecycle import EventKind, Lifecycle


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
    assert request.num_preemptions == 0


def test_a_request_that_is_preempted_pays_in_one_gap() -> None:
    """The second scheduling is no queueing delay: that is until the first."""
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
    assert request.num_preemptions == 1
    assert request.first(EventKind.SCHEDULED) == 12.0
    assert request.first(EventKind.SWAPPED_IN) is None


def test_a_request_that_hangs_up_before_its_first_token() -> None:
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
