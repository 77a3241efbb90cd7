"""What requests are ranked by: all choices of a request count as one. And how long a slice is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.served import PROMPT_WEIGHT
from floodplain.core.view import Prices, SequenceView, View
from floodplain.policy.cfs import CfsPolicy
from floodplain.policy.deadlines import Deadlines
from floodplain.policy.fair import FairPolicy, work_by_key
from floodplain.policy.ranking import LINK_USE, Slice, slice_for, tokens_of_requests
from floodplain.policy.settings import SharingSettings, settings_for
from floodplain.policy.shares import work_of_keys
from tests.support.examples import examples
from tests.support.views import host, make_view, stream, swapped, waiting

SETTINGS = SharingSettings(slice_steps=4)
SHARING = [FairPolicy(SETTINGS), CfsPolicy(SETTINGS)]


def choice(row: SequenceView, parent: int, **fields: object) -> SequenceView:
    return replace(row, parent=SeqId(parent), **fields)  # type: ignore[arg-type]


def order(policy: FairPolicy | CfsPolicy, view: View) -> list[int]:
    return [row.seq_id for row in policy.rank(view, 0.0).rows]


def test_choices_count_together_with_those_that_ended() -> None:
    rows = [choice(stream(number), 1, num_ended_tokens=9) for number in (1, 2)]
    assert tokens_of_requests(make_view(*rows, stream(3)), 4) == {1: 17, 2: 21, 3: 4}


def test_the_least_served_choice_of_a_request_ranks_first() -> None:
    rows = [choice(stream(0, num_tokens=20), 0), choice(swapped(1), 0), choice(waiting(2), 0)]
    assert tokens_of_requests(make_view(*rows), 5) == {2: 16, 1: 21, 0: 26}


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_a_request_of_many_choices_does_not_stand_before_a_request_of_one(policy: FairPolicy | CfsPolicy) -> None:
    many = [swapped(number, parent=SeqId(0)) for number in range(4)]
    assert order(policy, make_view(*many, swapped(9))) == [9, 0, 1, 2, 3]
    alone = [swapped(number) for number in range(4)]
    assert order(policy, make_view(*alone, swapped(9))) == [0, 1, 2, 3, 9]  # control: counted by choice


@pytest.mark.parametrize("policy", SHARING, ids=lambda policy: policy.name)
def test_a_further_choice_is_no_newcomer(policy: FairPolicy | CfsPolicy) -> None:
    """Its request has been served: it does not go before others as a request without a token does."""
    served = stream(0, num_tokens=60)
    assert order(policy, make_view(served, swapped(1), choice(waiting(2), 0))) == [1, 2, 0]
    assert order(policy, make_view(served, swapped(1), waiting(2))) == [2, 1, 0]  # control: a request of its own


def test_between_keys_the_prompt_of_several_choices_counts_once() -> None:
    rows = [choice(stream(number, client="a"), 0) for number in range(3)]
    view = make_view(*rows, stream(9, client="b"), key_credits={"a": 0.0, "b": 0.0})
    assert work_of_keys(view) == {"a": 4 + 3 * 4, "b": 4 + 4}  # half of a prompt of eight


def test_within_a_key_a_request_of_many_choices_counts_as_one() -> None:
    rows = [swapped(number, parent=SeqId(0), client="a") for number in range(4)] + [swapped(9, client="a")]
    ranks = work_by_key(make_view(*rows, key_credits={"a": 0.0}), 4)
    assert sorted(ranks, key=ranks.__getitem__) == [9, 0, 1, 2, 3]


def test_a_further_choice_has_no_prompt_to_be_served() -> None:
    first = waiting(0, 40)
    view = make_view(first, choice(waiting(1, 40), 0))
    deadlines = Deadlines(view, 0.0, SETTINGS, 4)
    assert deadlines.pending(first) - deadlines.pending(view.waiting[1]) == 40 * PROMPT_WEIGHT


# -- the length of a slice: as set, or as long as the copies for the next one ------------------------------------------


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
    ("field", "value", "message"),
    [
        ("slice_steps", 0, "slice must be between 1 and 10000 steps, not 0"),
        ("slice_steps", 10_001, "slice must be between 1 and 10000 steps, not 10001"),
        ("ttft_goal_s", 0.0, "ttft_goal must be above 0 seconds, not 0.0"),
        ("tpot_goal_s", float("nan"), "tpot_goal must be above 0 seconds, not nan"),
        ("fair_by", "user", "fair_by must be one of request, key, not 'user'"),
        ("max_gap_s", 0.0, "max_gap must be above 0 seconds, not 0.0"),
        ("line_patience", 0.5, "line_patience must be between 1 and 1000, not 0.5"),
        ("line_patience", 1001, "line_patience must be between 1 and 1000, not 1001"),
        ("rotation_share", 0.0, "rotation_share and prefill_share lie between 0 and 1"),
        ("rotation_share", 1.0, "rotation_share and prefill_share lie between 0 and 1"),
        ("prefill_share", 0.0, "rotation_share and prefill_share lie between 0 and 1"),
        ("prompt_share", 1.1, "prompt_share lies between 0 and 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(field: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        SharingSettings(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_pace_is_the_inverse_of_a_tpot_goal() -> None:
    assert settings_for("paced", pace=8.0).tpot_goal_s == 0.125
    assert settings_for("paced", pace=None, tpot_goal_s=0.5).tpot_goal_s == 0.5
    for pace in (0.0, float("nan"), 1e7):
        with pytest.raises(UserError, match=r"^pace must be above 0"):
            settings_for("paced", pace=pace)
