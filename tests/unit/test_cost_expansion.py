"""The closed form of expansion against its definition, and the stall of a step against a walk through its layers."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.layer_places import LayerPlaces
from floodplain.cost.expansion import best_expansion, best_places, critical_paths, expansion_gain, step_stall_s
from tests.support.examples import examples
from tests.support.layer_steps import AheadLayers, LayerLink, LayerWork


@st.composite
def any_places(draw: st.DrawFn) -> LayerPlaces:
    num_layers = draw(st.integers(3, 90))
    num_slots = draw(st.integers(2, min(4, num_layers - 1)))
    num_streamed = draw(st.sampled_from([0, *range(num_slots + 1, num_layers + 1)]))
    return LayerPlaces(num_layers, num_streamed, num_slots)


@given(any_places(), st.floats(0.01, 1.0), st.integers(1, 10_000))
@settings(max_examples=examples(100))
def test_stall_is_that_of_a_walk_through_the_layers(places: LayerPlaces, step_s: float, num_bytes: int) -> None:
    """``layer_steps`` simulates steps copy by copy, without critical paths."""
    walk = AheadLayers(places, LayerLink(inbound_bandwidth=1e5, outbound_bandwidth=inf))
    work = LayerWork((step_s / places.num_layers,) * places.num_layers, num_bytes)
    stall_s = step_stall_s(places, step_s, num_bytes / 1e5)
    assert [walk.step(work) for _ in range(3)] == pytest.approx([stall_s] * 3, abs=1e-6)


@given(any_places().filter(lambda places: places.num_streamed > 0), st.floats(0.01, 1.0))
@settings(max_examples=examples(50))
def test_copies_that_take_no_time_hide_and_longer_ones_wait_longer(places: LayerPlaces, step_s: float) -> None:
    stalls = [step_stall_s(places, step_s, part * step_s / places.num_streamed) for part in (0, 0.5, 1, 2, 4)]
    assert stalls[0] == 0 and stalls == sorted(stalls)
    assert stalls[-1] >= 3 * step_s - 1e-9, "the link alone takes four times the step"
    assert step_stall_s(LayerPlaces(places.num_layers), step_s, 1.0) == 0


def test_control_compute_or_the_link_alone_do_not_give_the_step_time() -> None:
    places, step_s, copy_s = LayerPlaces(30, 27), 0.03, 0.0011
    assert len(critical_paths(places)) > 2
    bounds = [step_s, copy_s * places.num_streamed + step_s / places.num_layers]
    assert step_stall_s(places, step_s, copy_s) > 1.01 * (max(bounds) - step_s)


@given(st.floats(0.01, 0.9), st.floats(0.1, 20.0))
@settings(max_examples=examples(100))
def test_at_the_best_expansion_copies_take_as_long_as_the_step(link_ratio: float, weights_per_pool: float) -> None:
    best = best_expansion(weights_per_pool, 1.0, link_ratio)
    streamed_bytes = (1 - 1 / best) * best
    assert streamed_bytes / link_ratio == pytest.approx(weights_per_pool + best)


def test_gain_follows_from_the_step_times() -> None:
    weights, pool = 26e9, 3e9
    for expansion in (1.0, 1.5, 2.4):
        step_bytes = [weights + e * pool for e in (1.0, expansion)]
        assert expansion_gain(expansion, weights, pool) == pytest.approx(expansion * step_bytes[0] / step_bytes[1])
    assert best_expansion(weights, pool, 1.0) == inf


def test_figures_of_the_paper_for_a_pool_of_3_gb_on_gh200() -> None:
    """OPT-13B: Pie finds 2.08 by search, and up to 1.9 times the tokens per second."""
    weights, pool, link_ratio = 25.7e9, 3e9, 419 / (0.85 * 4000)
    assert best_expansion(weights, pool, link_ratio) == pytest.approx(2.34, abs=0.01)
    places = best_places(40, weights, pool, link_ratio)
    assert (places.num_streamed, places.expansion) == (24, pytest.approx(2.11, abs=0.01))
    assert expansion_gain(places.expansion, weights, pool) == pytest.approx(1.89, abs=0.02)


@given(st.integers(4, 90), st.floats(0.01, 0.5), st.floats(0.5, 15.0))
@settings(max_examples=examples(60))
def test_whole_layers_and_slots_never_gain_more(num_layers: int, link_ratio: float, weights: float) -> None:
    places = best_places(num_layers, weights, 1.0, link_ratio)
    assert places.expansion <= best_expansion(weights, 1.0, link_ratio) * (1 + 1e-9)
