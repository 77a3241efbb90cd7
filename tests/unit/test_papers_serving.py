"""Loads of the papers: a burst's phases and its pause, and lengths by their quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from floodplain.papers.serving import ARXIV, SHAREGPT, Burst, Lengths, poisson_rows

BURST = Burst(rate=0.5, factor=3.0, pause_s=90.0, num_before=20, num_after=8, burst_s=40.0)


def test_a_burst_has_its_rates_and_a_pause_without_arrivals() -> None:
    times = [row.arrival_s for row in BURST.rows(SHAREGPT, 5)]
    assert times == sorted(times) and len(times) == 20 + 60 + 8
    for count, start_s, end_s in ((20, 0.0, 40.0), (60, 40.0, 80.0), (0, 80.0, 170.0), (8, 170.0, 186.0)):
        assert sum(start_s <= when < end_s for when in times) == count


def test_a_load_is_the_same_for_the_same_seed_only() -> None:
    assert BURST.rows(SHAREGPT, 5) == BURST.rows(SHAREGPT, 5) != BURST.rows(SHAREGPT, 6)
    assert poisson_rows(ARXIV, 2.0, 30, 1) == poisson_rows(ARXIV, 2.0, 30, 1) != poisson_rows(ARXIV, 2.0, 30, 2)
    assert all(7.0 <= row.arrival_s <= 22.0 for row in poisson_rows(ARXIV, 2.0, 30, 1, start_s=7.0))


@pytest.mark.parametrize("lengths", [SHAREGPT, ARXIV])
def test_lengths_have_the_quantiles_that_the_papers_state(lengths: Lengths) -> None:
    drawn = np.array(lengths.draw(20_000, np.random.default_rng(0)))
    assert np.median(drawn, axis=0) == pytest.approx([lengths.prompt[0], lengths.output[0]], rel=0.05)
    assert np.quantile(drawn, 0.9, axis=0) == pytest.approx([lengths.prompt[1], lengths.output[1]], rel=0.05)
    assert drawn.min() >= 1 and drawn.sum(axis=1).max() <= lengths.longest
