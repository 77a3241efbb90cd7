"""Laws of the controllers for any input: legal places, rare changes, rest under a steady load, determinism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expansion.pie_expansion import PieExpansion, PieSettings
from floodplain.core.layer_places import LayerPlaces, every_place
from floodplain.cost.expansion import step_stall_s
from floodplain.policy.expansion import ExpansionDecision, ExpansionPolicy, ExpansionSettings, ExpansionView
from tests.support.examples import examples

BASE = 200
Policy = ExpansionPolicy | PieExpansion
Make = Callable[[tuple[LayerPlaces, ...]], Policy]
MAKES: list[Make] = [lambda places: ExpansionPolicy(places, BASE), PieExpansion]
VIEWS = st.lists(
    st.tuples(
        st.integers(1, 60),  # equal steps
        st.sampled_from([0.0, 0.01, 0.02, 0.1]),  # step_s
        st.sampled_from([0.0, 0.0, 0.001, 0.05]),  # stall_s
        st.sampled_from([0.0, 1e-5, 3e-4, 1e-3, 0.02]),  # copy_s
        st.floats(0.0, 1.0),  # held part of the pool
        st.booleans(),
        st.none() | st.floats(0.0, 0.05),  # fixed_s
        st.booleans(),  # whether the engine refuses changes
    ),
    min_size=1,
    max_size=15,
)
PLACES = st.tuples(st.integers(4, 60), st.integers(0, 3)).map(
    lambda numbers: tuple(every_place(numbers[0]))[min(numbers[1], numbers[0] - 3) :]
)


def run(policy: Policy, places: tuple[LayerPlaces, ...], views: list[tuple]) -> list[ExpansionDecision]:  # type: ignore[type-arg]
    """Return all decisions at boundaries with a step; the engine applies them, or refuses."""
    by_number = {one.num_streamed: one for one in places}
    number, told = places[0].num_streamed, []
    for count, step_s, stall_s, copy_s, part, is_binding, fixed_s, refuses in views:
        for _ in range(count):
            num_blocks = int(BASE * by_number[number].expansion)
            view = ExpansionView(
                step_s=step_s, stall_s=stall_s, copy_s=copy_s, num_streamed=number, num_blocks=num_blocks,
                num_held_blocks=int(part * num_blocks), is_binding=is_binding, fixed_s=fixed_s,
            )  # fmt: skip
            decision = policy.decide(view)
            if step_s:
                told.append(decision)
            number = number if refuses else decision.num_streamed
    return told


@pytest.mark.parametrize("make", MAKES)
@given(PLACES, VIEWS)
@settings(max_examples=examples(40))
def test_decisions_are_legal_seldom_and_equal(make: Make, places: tuple[LayerPlaces, ...], views: list[tuple]) -> None:  # type: ignore[type-arg]
    told = run(make(places), places, views)
    assert {one.num_streamed for one in told} <= {one.num_streamed for one in places}
    changes = [at for at, (a, b) in enumerate(pairwise(told)) if a.num_streamed != b.num_streamed]
    hold = min(ExpansionSettings().hold_steps, PieSettings().trial_steps)
    assert all(b - a >= hold for a, b in pairwise(changes))
    assert told == run(make(places), places, views)


@given(PLACES, VIEWS, st.floats(0.005, 0.1), st.floats(0.0, 3.0), st.floats(0.1, 1.0), st.booleans())
@settings(max_examples=examples(15))
def test_a_steady_load_is_at_rest_in_the_end(
    places: tuple[LayerPlaces, ...],
    before: list[tuple],  # type: ignore[type-arg]
    step_s: float,
    link_share: float,
    part: float,
    is_binding: bool,
) -> None:
    """For any history. A full pool's KV grows with the pool, and makes copies longer; stalls are as predicted."""
    policy = ExpansionPolicy(places, BASE)
    run(policy, places, [(*one[:-1], True) for one in before])
    by_number = {one.num_streamed: one for one in places}
    num_layers, number, numbers = places[0].num_layers, places[0].num_streamed, []
    for _ in range(1400):
        here = by_number[number]
        num_blocks = int(BASE * here.expansion)
        held = num_blocks if is_binding else min(num_blocks, int(part * 0.8 * BASE))
        copy_s = link_share * step_s / num_layers * held / BASE
        view = ExpansionView(
            step_s=step_s, stall_s=step_stall_s(here, step_s, copy_s), copy_s=copy_s, num_streamed=number,
            num_held_blocks=held, num_blocks=num_blocks, is_binding=is_binding,
        )  # fmt: skip
        number = policy.decide(view).num_streamed
        numbers.append(number)
    assert len(set(numbers[-300:])) == 1
    if number and number != places[0].num_streamed:
        assert view.stall_s <= 0.0101 * (view.step_s + view.stall_s)
    if not is_binding:
        assert number == places[0].num_streamed


def test_control_with_a_short_memory_of_stalls_places_flap() -> None:
    """The prediction misses the measured stalls: with the shortest memory of them, changes are retried more often."""
    places = tuple(every_place(32))
    changes = []
    for retry_steps in (256, 2048):
        policy, number, numbers = ExpansionPolicy(places, BASE, ExpansionSettings(retry_steps=retry_steps)), 0, []
        for _ in range(2000):
            view = ExpansionView(
                step_s=0.02, stall_s=0.002 if number > 8 else 0.0, copy_s=1e-5, num_streamed=number,
                num_held_blocks=BASE, num_blocks=int(BASE * 32 / (35 - number or 32)), is_binding=True,
            )  # fmt: skip
            number = policy.decide(replace(view)).num_streamed
            numbers.append(number)
        changes.append(sum(a != b for a, b in pairwise(numbers)))
    assert changes[0] > 1.5 * changes[1]
