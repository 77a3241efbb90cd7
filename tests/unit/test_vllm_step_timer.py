"""Durations of vLLM's steps, of which up to three are outstanding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.plugins.vllm.step_timer import StepTimer

STEPS = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.125, 9.0)), min_size=1, max_size=12)


@given(steps=STEPS, depth=st.integers(1, 3))
def test_each_step_takes_as_long_as_the_device_computed_it(steps: list[tuple[float, float]], depth: int) -> None:
    """A step is planned some time after the last result, and computes as soon as the device is free."""
    timer, now, free_s, outstanding = StepTimer(), 1.0, 0.0, list[tuple[float, float]]()

    def take_oldest() -> float:
        end_s, length_s = outstanding.pop(0)
        assert timer.end(end_s) == pytest.approx(length_s)
        return end_s

    for pause_s, length_s in steps:
        if len(outstanding) == depth:
            now = max(now, take_oldest())
        now += pause_s
        timer.begin(now, computes=True)
        free_s = max(now, free_s) + length_s
        outstanding.append((free_s, length_s))
    while outstanding:
        take_oldest()


def test_an_empty_step_computes_nothing() -> None:
    timer = StepTimer()
    assert not timer.is_computing
    timer.begin(1.0, computes=True)
    timer.begin(2.0, computes=False)
    assert timer.is_computing
    timer.end(3.0)
    assert not timer.is_computing
