"""The knee of a throughput curve equals an exhaustive search's, despite noise, and is found in few batches."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.profiler.knee import Knee, KneeSettings, find_knee, next_batch
from tests.support.examples import examples

Curve = Callable[[int], float]
PEAK = 100.0


def ramp(batch: int, corner: float) -> float:
    """A throughput proportional to the batch up to the corner, then constant: all cores are busy."""
    return PEAK * min(1.0, batch / corner)


def bend(batch: int, half: float) -> float:
    """A fixed time per batch plus a time per item: half of the peak at ``half``."""
    return PEAK * batch / (batch + half)


def climb(batch: int, corner: float) -> float:
    """A ramp whose plateau still rises by 1 % a doubling."""
    return ramp(batch, corner) * 1.01 ** max(0.0, log2(batch / corner))


CURVES = st.tuples(st.sampled_from([ramp, bend, climb]), st.floats(0.5, 200.0)).map(
    lambda drawn: lambda batch: drawn[0](batch, drawn[1])
)
SETTINGS = st.builds(
    KneeSettings, tolerance=st.floats(0.02, 0.3), max_batch=st.integers(1, 5000), resolution=st.just(0.0)
)
LIMITS = st.integers(2, 5000)


def search(curve: Curve, how: KneeSettings, limit: int = 2**30) -> tuple[Knee, dict[int, float | None]]:
    """Return the knee, and the readings of a curve whose batches from ``limit`` on do not fit."""
    readings: dict[int, float | None] = {}
    while (batch := next_batch(readings, how)) is not None:
        assert 1 <= batch <= how.max_batch and batch not in readings
        assert all(value is not None or batch < other for other, value in readings.items()), "known not to fit"
        readings[batch] = curve(batch) if batch < limit else None
        assert len(readings) < 60
    knee = find_knee(readings, how)
    assert knee is not None
    return knee, readings


def measured(readings: dict[int, float | None]) -> list[int]:
    return [batch for batch, value in readings.items() if value is not None]


@settings(max_examples=examples(200))
@given(CURVES, SETTINGS, LIMITS)
def test_it_is_the_smallest_batch_near_the_highest_throughput(curve: Curve, how: KneeSettings, limit: int) -> None:
    knee, readings = search(curve, how, limit)
    goal = max(curve(batch) for batch in measured(readings)) / (1 + how.tolerance)
    assert knee.batch == next(batch for batch in range(1, how.max_batch + 1) if curve(batch) >= goal)
    assert knee.throughput == curve(knee.batch)


@settings(max_examples=examples(200))
@given(CURVES, SETTINGS, LIMITS)
def test_it_ends_when_two_doublings_gain_little_or_the_limit_is_reached(
    curve: Curve, how: KneeSettings, limit: int
) -> None:
    knee, readings = search(curve, how, limit)
    largest = max(measured(readings))
    doublings = [2**k for k in range(int(log2(largest)))]
    little = [curve(2 * batch) < (1 + how.tolerance) * curve(batch) for batch in doublings]
    assert knee.is_saturated == bool(little and little[-1])
    if largest < min(how.max_batch, limit - 1):
        assert knee.is_saturated, "one doubling is enough where the next does not fit"
        assert little[-2:] == [True, True] or knee.limit is not None
    assert knee.limit == min((batch for batch, value in readings.items() if value is None), default=None)


@settings(max_examples=examples(100))
@given(CURVES, SETTINGS, LIMITS)
def test_few_batches_are_measured(curve: Curve, how: KneeSettings, limit: int) -> None:
    assert len(search(curve, how, limit)[1]) <= 3 * log2(how.max_batch) + 3


@settings(max_examples=examples(200))
@given(CURVES, SETTINGS, LIMITS, st.floats(0.0, 0.05), st.integers(0, 2**32))
def test_noise_moves_the_knee_by_no_more_than_itself(
    curve: Curve, how: KneeSettings, limit: int, noise: float, seed: int
) -> None:
    random = Random(seed)
    knee, readings = search(lambda batch: curve(batch) * random.uniform(1 - noise, 1 + noise), how, limit)
    factor = (1 + noise) / (1 - noise)
    goal = max(curve(batch) for batch in measured(readings)) / (1 + how.tolerance)
    assert curve(knee.batch) >= goal / factor * (1 - 1e-9)
    assert knee.batch == 1 or curve(knee.batch - 1) <= goal * factor * (1 + 1e-9)


@settings(max_examples=examples(50))
@given(SETTINGS, LIMITS)
def test_what_never_saturates_is_served_with_all_that_fits(how: KneeSettings, limit: int) -> None:
    knee, _ = search(float, how, limit)
    largest = min(how.max_batch, limit - 1)
    assert not knee.is_saturated
    assert largest / (1 + how.tolerance) <= knee.batch <= largest


@given(st.floats(0.0, 0.5), st.floats(1.0, 400.0), LIMITS)
def test_a_coarse_search_is_off_by_its_resolution(resolution: float, corner: float, limit: int) -> None:
    def curve(batch: int) -> float:
        return ramp(batch, corner)

    exact, _ = search(curve, KneeSettings(resolution=0.0), limit)
    coarse, readings = search(curve, KneeSettings(resolution=resolution), limit)
    slack = 1 + resolution
    assert exact.batch / slack - 1 <= coarse.batch <= exact.batch * slack + 1
    assert len(readings) <= len(search(curve, KneeSettings(resolution=0.0), limit)[1])


def test_one_flat_doubling_is_no_plateau() -> None:
    steps = {1: 10.0, 2: 10.1, 4: 40.0, 8: 80.0, 16: 81.0, 32: 81.0}
    knee, _ = search(lambda batch: steps[2 ** (batch.bit_length() - 1)], KneeSettings(), 64)
    assert knee == Knee(8, 80.0, True, None)


def test_a_plateau_is_not_followed_to_the_end_of_memory() -> None:
    knee, readings = search(lambda batch: ramp(batch, 4.0), KneeSettings(), 16)
    assert knee == Knee(4, PEAK, True, 16)
    assert list(readings) == [1, 2, 4, 8, 16, 3]


def test_a_plateau_that_falls_ends_at_its_top() -> None:
    knee, _ = search(lambda batch: min(batch, 10) - batch / 100, KneeSettings(resolution=0.0))
    assert knee.batch == 10 and knee.is_saturated


def test_nothing_fits_is_an_answer() -> None:
    assert next_batch({1: None}, KneeSettings()) is None
    assert find_knee({1: None}, KneeSettings()) is None


@pytest.mark.parametrize("wrong", [{"tolerance": 0.0}, {"tolerance": 1.0}, {"max_batch": 0}, {"resolution": 1.0}])
def test_bad_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(wrong)).replace('_', '-')} must be"):
        KneeSettings(**wrong)  # type: ignore[arg-type]
