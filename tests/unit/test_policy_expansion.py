"""Decisions of the expansion policy, one reason at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.layer_places import LayerPlaces, every_place
from floodplain.policy.expansion import ExpansionLimit, ExpansionPolicy, ExpansionSettings, ExpansionView

EVERY = tuple(every_place(32))
HOLD = ExpansionSettings().hold_steps
SHORT = ExpansionView(
    step_s=0.03, stall_s=0.0, copy_s=1e-5, num_streamed=0, num_held_blocks=100, num_blocks=100, is_binding=True
)


def after(policy: ExpansionPolicy, view: ExpansionView, num_steps: int = HOLD) -> tuple[int, ExpansionLimit | None]:
    """The decision after so many equal steps, if the engine applies each decision."""
    for _ in range(num_steps):
        decision = policy.decide(view)
        blocks = int(100 * next(one.expansion for one in EVERY if one.num_streamed == decision.num_streamed))
        is_full = view.num_held_blocks == view.num_blocks
        view = replace(view, num_streamed=decision.num_streamed, num_blocks=blocks)
        view = replace(view, num_held_blocks=blocks) if is_full else view
    return decision.num_streamed, decision.limited


def test_short_memory_and_copies_that_hide_make_layers_stream() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    assert after(policy, SHORT, HOLD - 1) == (0, ExpansionLimit.MEMORY_SUFFICES), "nothing is reviewed yet"
    num_streamed, limited = after(policy, SHORT, 1)
    assert num_streamed >= 4 and limited is None
    assert EVERY[num_streamed - 3].expansion <= ExpansionSettings().most_growth


def test_a_layer_that_cannot_hide_does_not_stream() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    assert after(policy, replace(SHORT, copy_s=0.02), 400) == (0, ExpansionLimit.COPIES_SHOW)


def test_little_gain_leaves_all_layers_where_they_are() -> None:
    """If step time grows with the batch, nothing is gained; if more than half of it is fixed, something is."""
    assert after(ExpansionPolicy(EVERY, 100), replace(SHORT, fixed_s=0.0), 400) == (0, ExpansionLimit.LITTLE_GAIN)
    assert after(ExpansionPolicy(EVERY, 100), replace(SHORT, fixed_s=0.02))[0] > 0


def test_only_the_first_places_hide_and_gain_too_little() -> None:
    """Of 80 layers, streaming four gains 1.3 %, with hidden copies; copies of five show."""
    places = tuple(every_place(80))
    policy = ExpansionPolicy(places, 1000, ExpansionSettings(margin=0.0))
    least = next(copy for copy in range(1, 2000) if not _hides(places[2], copy * 1e-5))
    view = replace(SHORT, copy_s=least * 1e-5, num_held_blocks=1000, num_blocks=1000)
    assert _hides(places[1], view.copy_s)
    for _ in range(HOLD):
        decision = policy.decide(view)
    assert (decision.num_streamed, decision.limited) == (0, ExpansionLimit.LITTLE_GAIN)


def _hides(places: LayerPlaces, copy_s: float) -> bool:
    from floodplain.cost.expansion import step_stall_s

    stall_s = step_stall_s(places, SHORT.step_s, places.expansion * copy_s)
    return stall_s / (SHORT.step_s + stall_s) <= 0.005


def test_memory_that_suffices_lets_nothing_stream() -> None:
    calm = replace(SHORT, is_binding=False, num_held_blocks=40)
    assert after(ExpansionPolicy(EVERY, 100), calm, 400) == (0, ExpansionLimit.MEMORY_SUFFICES)


def test_memory_that_is_not_needed_any_more_is_freed_after_calm_steps() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    high, _ = after(policy, SHORT, 20 * HOLD)
    calm = replace(SHORT, is_binding=False, num_held_blocks=60, num_streamed=high, num_blocks=300)
    calm_steps = ExpansionSettings().calm_steps
    assert after(policy, calm, calm_steps - HOLD)[0] == high
    assert after(policy, calm, 2 * HOLD) == (0, ExpansionLimit.MEMORY_SUFFICES)


def test_layers_that_stop_streaming_leave_room_for_the_peak() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    high, _ = after(policy, SHORT, 20 * HOLD)
    calm = replace(SHORT, is_binding=False, num_held_blocks=120, num_streamed=high, num_blocks=300)
    low, _ = after(policy, calm, 400)
    assert 0 < low < high
    assert 120 / 0.85 <= 100 * EVERY[low - 3].expansion < 160


def test_a_slower_link_lets_fewer_layers_stream_at_the_next_review() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    high, _ = after(policy, SHORT, 40 * HOLD)
    slow = replace(SHORT, num_streamed=high, copy_s=2 * SHORT.step_s / high, num_held_blocks=300, num_blocks=300)
    assert after(policy, slow, HOLD)[0] < high
    assert after(policy, slow, HOLD)[1] is ExpansionLimit.COPIES_SHOW


def test_gross_measured_stalls_count_although_copies_should_hide() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    high, _ = after(policy, SHORT, 40 * HOLD)
    stalling = replace(SHORT, num_streamed=high, stall_s=0.01)
    low, limited = after(policy, stalling, 3 * HOLD)
    assert low < high and limited is ExpansionLimit.COPIES_SHOW


def test_boundaries_without_a_step_change_nothing() -> None:
    policy = ExpansionPolicy(EVERY, 100)
    assert after(policy, replace(SHORT, step_s=0.0), 10 * HOLD)[0] == 0


def test_a_floor_with_streams_is_kept() -> None:
    """The pool keeps the blocks that long prompts need."""
    policy = ExpansionPolicy(EVERY[5:], 100)
    for copy_s in (1e-5, 1.0):
        calm = replace(SHORT, num_streamed=EVERY[5].num_streamed, copy_s=copy_s, num_held_blocks=1, is_binding=False)
        assert after(policy, calm, 300)[0] == EVERY[5].num_streamed


def test_the_largest_places_give_that_as_the_limit() -> None:
    policy = ExpansionPolicy(EVERY[:3], 100)
    assert after(policy, SHORT, 10 * HOLD) == (EVERY[2].num_streamed, ExpansionLimit.LARGEST)
    assert after(ExpansionPolicy(EVERY[:1], 100), SHORT, 10 * HOLD) == (0, ExpansionLimit.LARGEST)


def test_places_of_others_and_settings_that_contradict_are_refused() -> None:
    with pytest.raises(InvariantError, match="none of"):
        ExpansionPolicy(EVERY[:3], 100).decide(replace(SHORT, num_streamed=9))
    for wrong in ({"hold_steps": 0}, {"window_steps": 8}, {"calm_steps": 32}, {"room": 0.0}, {"most_growth": 0.9}):
        with pytest.raises(InvariantError):
            ExpansionSettings(**wrong)  # type: ignore[arg-type]
