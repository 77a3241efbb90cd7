"""Gaps in a histogram have the statistics of the gaps, percentiles within 0.05 %."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.observe.load_table import AllGaps, GapHistogram, summarise

GAPS = st.lists(st.floats(1e-8, 1e5), max_size=30)


@given(st.lists(GAPS, max_size=4))
def test_histogram_has_the_statistics_of_all_gaps(requests: list[list[float]]) -> None:
    exact, near = AllGaps(), GapHistogram()
    for gaps_s in requests:
        exact.add(np.array(gaps_s))
        near.add(np.array(gaps_s))
    want, got = exact.summarise_ms(), near.summarise_ms()
    assert exact.max_s == near.max_s and want["max"] == got["max"]
    assert want == summarise([gap * 1e3 for gaps_s in requests for gap in gaps_s])
    assert list(want) == list(got)
    if want["mean"] is None:
        assert set(got.values()) == {None}
        return
    assert got["mean"] == pytest.approx(want["mean"], rel=1e-12)
    assert got["std"] == pytest.approx(want["std"], rel=1e-6, abs=1e-6 * want["mean"])
    for name in ("median", "p90", "p95", "p99"):
        assert got[name] == pytest.approx(want[name], rel=5.1e-4)
        assert got[name] <= got["max"]


@given(st.floats(1e-4, 1e2), st.integers(1, 50))
def test_equal_gaps_have_no_deviation(gap_s: float, count: int) -> None:
    gaps = GapHistogram()
    gaps.add(np.full(count, gap_s))
    found = gaps.summarise_ms()
    assert (found["std"], found["mean"]) == (0.0, found["max"])


def test_gaps_outside_the_bins_count() -> None:
    gaps = GapHistogram()
    gaps.add(np.array([0.0, 0.0, 0.0, 1e9]))
    found = gaps.summarise_ms()
    assert (found["median"], found["max"]) == (0.0, 1e12)
    assert found["mean"] == 2.5e11


def test_histogram_of_many_gaps_is_as_large_as_an_empty_one() -> None:
    gaps = GapHistogram()
    before = {name: getattr(value, "nbytes", 0) for name, value in vars(gaps).items()}
    gaps.add(np.random.default_rng(1).gamma(0.5, size=100_000))
    assert {name: getattr(value, "nbytes", 0) for name, value in vars(gaps).items()} == before
    assert sum(before.values()) < 300_000
