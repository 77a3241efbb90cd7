"""The length of a slice: as set, or as long as the copies for the next one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.core.plan import Reason
from floodplain.core.view import Prices
from floodplain.policy.ranking import LINK_USE, Slice, slice_for
from floodplain.policy.settings import SharingSettings, settings_for
from tests.support.examples import examples
from tests.support.views import host, make_view

SETTINGS = SharingSettings(slice_steps=4)


def test_a_fast_link_changes_nothing() -> None:
    view = make_view(tiers=(host(block_s=0.001),), prices=Prices(step_s=0.05))
    assert slice_for(view, 100, SETTINGS) == Slice(4)


def test_a_slow_link_makes_slices_longer_and_gives_the_reason() -> None:
    view = make_view(tiers=(host(block_s=0.01),), prices=Prices(step_s=0.05))
    assert slice_for(view, 100, SETTINGS) == Slice(24, Reason.LINK_BUSY)  # 1 s of copies in 85 % of 24 steps of 50 ms


@pytest.mark.parametrize("view", [make_view(tiers=(), prices=Prices(0.05)), make_view(tiers=(host(block_s=9.0),))])
def test_without_a_link_or_a_price_it_is_what_was_set(view: object) -> None:
    assert slice_for(view, 100, SETTINGS) == Slice(4)  # type: ignore[arg-type]


@settings(max_examples=examples(50))
@given(st.integers(0, 500), st.floats(1e-6, 1.0), st.floats(1e-4, 1.0), st.integers(1, 50), st.integers(0, 3))
def test_the_copies_always_fit_and_one_step_less_would_not_do(
    num_blocks: int, block_s: float, step_s: float, asked: int, beside: int
) -> None:
    view = make_view(tiers=(host(block_s=block_s),), prices=Prices(step_s))
    turn = slice_for(view, num_blocks, SharingSettings(slice_steps=asked), beside)
    copies_s = num_blocks * block_s / LINK_USE
    assert turn.steps >= asked
    assert (turn.steps + beside) * step_s >= copies_s * (1 - 1e-9)
    if turn.reason is Reason.LINK_BUSY:
        assert (turn.steps + beside - 1) * step_s <= copies_s * (1 + 1e-9)
    else:
        assert turn.steps == asked


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("slice_steps", 0, "^slice "),
        ("slice_steps", 10_001, "^slice "),
        ("ttft_goal_s", 0.0, "^ttft_goal "),
        ("tpot_goal_s", float("nan"), "^tpot_goal "),
        ("fair_by", "user", "^fair_by "),
        ("rotation_share", 1.0, "rotation_share"),
        ("prefill_share", 0.0, "prefill_share"),
        ("max_gap_s", 0.0, "^max_gap "),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: object, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        SharingSettings(**{field: value})  # type: ignore[arg-type]


def test_a_pace_is_the_inverse_of_a_tpot_goal() -> None:
    assert settings_for("paced", pace=8.0).tpot_goal_s == 0.125
    assert settings_for("paced", pace=None, tpot_goal_s=0.5).tpot_goal_s == 0.5
    for pace in (0.0, float("nan"), 1e7):
        with pytest.raises(UserError, match=r"^pace must be above 0"):
            settings_for("paced", pace=pace)
