"""Counts that pass through vLLM are reported exactly once; of a gauge, the last value; the durations of steps."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.plugins.vllm.step_timer import StepTimer
from floodplain.plugins.vllm.tally import COUNTERS, FAMILIES, SwapTally, merge

NAMES = ("out", "in")


def test_what_was_reported_is_not_reported_again() -> None:
    tally = SwapTally()
    tally.count("preemptions_total", "swap")
    tally.count("preemptions_total", "swap", by=2)
    tally.count("swap_bytes_total", "out", "host", by=0)
    tally.set("requests_swapped", to=3)
    assert tally.take() == {"counts": {"preemptions_total swap": 3}, "gauges": {"requests_swapped": 3}}
    tally.set("requests_swapped", to=3)
    assert tally.take() == {"counts": {}, "gauges": {}}
    tally.set("requests_swapped", to=0)
    assert tally.take() == {"counts": {}, "gauges": {"requests_swapped": 0}}, "a gauge that falls to 0 is news"


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.booleans()), max_size=30))
def test_tallies_merged_in_order_have_the_total_counts(events: list[tuple[str, int, bool]]) -> None:
    tally, total, last = SwapTally(), Counter[str](), dict[str, float]()
    merged: dict[str, Any] = {}
    for name, number, is_taken in events:
        tally.count("swap_bytes_total", name, "host", by=number)
        total[f"swap_bytes_total {name} host"] += number
        tally.set("requests_swapped", to=number)
        last["requests_swapped"] = number
        if is_taken:
            merged = merge(merged, json.loads(json.dumps(tally.take())))  # it is sent to another process
    merged = merge(merged, tally.take())
    assert merged["counts"] == {name: number for name, number in total.items() if number}
    assert merged["gauges"] == last


def test_names_have_as_many_labels_as_their_family() -> None:
    for name, family in FAMILIES.items():
        assert name.endswith("_total") is not family.is_gauge and family.text.endswith(".")


def test_each_counter_has_all_its_names_from_the_start() -> None:
    names = [name.split() for name in COUNTERS]
    assert {name for name, *_ in names} == {name for name, family in FAMILIES.items() if not family.is_gauge}
    assert all(len(values) == len(FAMILIES[name].labels) for name, *values in names)
    assert {"failed_transfers_total not_copied", "borrowed_leases_total forced"} <= set(COUNTERS), "alerts read these"


# -- durations of vLLM's steps, of which up to three are outstanding ---------------------------------------------------


STEPS = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.125, 9.0), st.booleans()), min_size=1, max_size=12)


@given(steps=STEPS, depth=st.integers(1, 3))
def test_each_step_takes_as_long_as_the_device_computed_it(steps: list[tuple[float, float, bool]], depth: int) -> None:
    """A step is planned some time after the last result, and computes as soon as the device is free.

    Copies run beside some of the steps.
    """
    timer, now, free_s, outstanding = StepTimer(), 1.0, 0.0, list[tuple[float, float, bool]]()

    def take_oldest() -> float:
        end_s, length_s, has_copies = outstanding.pop(0)
        assert timer.end(end_s) == (pytest.approx(length_s), has_copies)
        return end_s

    for pause_s, length_s, has_copies in steps:
        if len(outstanding) == depth:
            now = max(now, take_oldest())
        now += pause_s
        timer.begin(now, computes=True, has_copies=has_copies)
        free_s = max(now, free_s) + length_s
        outstanding.append((free_s, length_s, has_copies))
    while outstanding:
        take_oldest()


def test_an_empty_step_computes_nothing() -> None:
    timer = StepTimer()
    assert not timer.is_computing
    timer.begin(1.0, computes=True, has_copies=False)
    timer.begin(2.0, computes=False, has_copies=False)
    assert timer.is_computing
    timer.end(3.0)
    assert not timer.is_computing
