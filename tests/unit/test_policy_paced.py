"""``paced`` by example: which requests are newcomers, core or rotating streams, and how they rank."""

from __future__ import annotations

import math

import pytest

from floodplain.core.plan import Reason
from floodplain.core.request import Goals
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices, SequenceView, View
from floodplain.policy.goals import GRACE_TOKENS, PaceGoals, due_s
from floodplain.policy.paced import LEAST_SHARE, WIDE_SHARE, PacedPolicy, divide, longest_silence_s
from floodplain.policy.ranking import Ranking
from floodplain.policy.settings import SharingSettings
from tests.support.views import host, make_view, prompt, stream, swapped, waiting

NOW = 10.0


def rank(view: View, **settings: object) -> Ranking:
    """Rank with half of the device for rotating streams."""
    return PacedPolicy(SharingSettings(**{"rotation_share": 0.5} | settings)).rank(view, NOW)  # type: ignore[arg-type]


def order(view: View, **settings: object) -> list[int]:
    return [row.seq_id for row in rank(view, **settings).rows]


def parts(view: View, *, now: float = 0.0, **settings: object) -> tuple[list[int], list[int]]:
    streams = sorted((*view.running, *view.loading, *view.swapped), key=lambda row: row.order_key)
    parted = divide(view, streams, now, SharingSettings(**{"slice_steps": 4} | settings))  # type: ignore[arg-type]
    return [row.seq_id for row in parted.core], [row.seq_id for row in parted.rotating]


def row(number: int, last_token_s: float, **fields: object) -> SequenceView:
    return swapped(number, last_token_s=last_token_s, **fields)


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_core_are_the_oldest_streams_that_fit_into_its_part() -> None:
    view = make_view(*(swapped(number) for number in range(20)), num_blocks=30)
    assert parts(view, rotation_share=0.3) == ([*range(7)], [*range(7, 20)])  # 21 blocks of three each
    assert parts(view, rotation_share=0.7) == ([0, 1, 2], [*range(3, 20)])


def test_a_stream_that_does_not_fit_ends_the_core() -> None:
    """By arrival: a small stream does not pass a large one."""
    large = swapped(1, num_tokens=80)
    assert parts(make_view(swapped(0), large, swapped(2), swapped(3), num_blocks=30)) == ([0], [2, 3, 1])


PRICED = Prices(step_s=0.025, lone_step_s=0.02)


def test_while_all_goals_fit_into_the_device_rotating_streams_have_most_of_it() -> None:
    """Eighteen streams of three blocks in 50: at four steps of 25 ms a token they need 0.27 of the device."""
    view = make_view(*(swapped(number) for number in range(18)), num_blocks=50, prices=PRICED)
    assert WIDE_SHARE == 0.6
    assert parts(view, rotation_share=0.3, tpot_goal_s=0.1)[0] == [*range(6)]
    assert parts(view, rotation_share=0.3, tpot_goal_s=0.03)[0] == [*range(11)]  # 0.9 of it
    assert parts(view, rotation_share=0.9, tpot_goal_s=0.1)[0] == [0]


def test_requests_that_wait_count_by_their_prompts_for_what_fits() -> None:
    rows = [swapped(number) for number in range(12)]
    crowd = [waiting(20 + number, 60) for number in range(6)]
    prices = {"num_blocks": 50, "prices": PRICED}
    assert len(parts(make_view(*rows, **prices), tpot_goal_s=0.05)[0]) == 6  # type: ignore[arg-type]
    assert len(parts(make_view(*rows, *crowd, **prices), tpot_goal_s=0.05)[0]) == 11  # type: ignore[arg-type]


def test_without_a_goal_it_is_five_times_what_a_token_takes_alone() -> None:
    assert PaceGoals(make_view(prices=PRICED), None).of(swapped(0)) == pytest.approx(0.1)
    assert PaceGoals(make_view(prices=PRICED), 0.3).of(swapped(0)) == 0.3
    assert PaceGoals(make_view(), None).of(swapped(0)) == math.inf


@pytest.mark.parametrize(("num_slots", "core"), [(1000, 7), (48, 8), (16, 9), (0, 9)])
def test_the_rotation_needs_eight_slots_for_each_of_its_blocks(num_slots: int, core: int) -> None:
    """Of 30 blocks: 9, 6 and then the least, 2."""
    tiers = (host(num_slots=num_slots, num_free_slots=0),) if num_slots else ()
    view = make_view(*(swapped(number) for number in range(12)), num_blocks=30, tiers=tiers)
    assert LEAST_SHARE == 0.07
    assert len(parts(view, rotation_share=0.3)[0]) == core


def test_the_core_shrinks_if_an_overdue_rotating_stream_does_not_fit_its_part() -> None:
    """A rotation of 12 of 30 blocks; the overdue stream needs 21, so the core's youngest makes room for it."""
    large = row(9, 0.0, num_tokens=80, num_backed_blocks=20)
    view = make_view(*(stream(number) for number in range(6)), large, num_blocks=30)
    assert parts(view, rotation_share=0.4, now=4.8)[0] == [*range(6)]
    assert parts(view, rotation_share=0.4, now=4.9) == ([0, 1, 2], [9, 3, 4, 5])


# -- the order -------------------------------------------------------------------------------------------------------


def test_newcomers_rank_before_the_core_and_the_core_before_rotating_streams() -> None:
    streams = [row(number, 9.0) for number in range(4)]
    view = make_view(*streams, waiting(8), prompt(9), num_blocks=9)
    assert order(view) == [8, 9, 0, 1, 2, 3]


def test_of_rotating_streams_the_longest_silence_ranks_first_once_it_is_overdue() -> None:
    """Overdue: silent for over four fifths of ``max_gap_s``. Others rank by tokens."""
    silent = [row(1, 4.0), row(2, 9.0, num_tokens=30), row(3, 3.0), row(4, 8.0)]
    view = make_view(swapped(0), *silent, num_blocks=5)
    assert order(view, max_gap_s=5.0) == [0, 3, 1, 4, 2]
    assert order(view, max_gap_s=8.0) == [0, 3, 1, 4, 2]
    assert order(view, max_gap_s=100.0) == [0, 1, 3, 4, 2]


def test_rotating_streams_with_fewer_tokens_rank_first_in_rounds_that_double() -> None:
    """1 and 2 tokens, 3 to 6, 7 to 14; within a round by arrival."""
    tokens = {1: 14, 2: 11, 3: 3, 4: 6, 5: 7, 6: 1}
    rows = [row(number, NOW, num_tokens=8 + count) for number, count in tokens.items()]
    assert order(make_view(swapped(0), *rows, num_blocks=5)) == [0, 6, 3, 4, 1, 2, 5]


def test_rotating_streams_that_are_late_rank_behind_those_on_time() -> None:
    """At 0.1 s a token and four tokens, a stream is late 2 s after its first one."""
    late, on_time = row(1, NOW, first_token_s=7.9), row(2, NOW, first_token_s=8.1, num_tokens=12)
    assert GRACE_TOKENS == 16
    view = make_view(swapped(0), late, on_time, num_blocks=5)
    assert order(view, tpot_goal_s=0.1) == [0, 2, 1]
    assert order(view, tpot_goal_s=0.2) == [0, 1, 2]


def test_tokens_ahead_of_the_goal_count() -> None:
    goals = PaceGoals(make_view(), 0.1)
    assert goals.is_late(row(1, NOW, num_tokens=12, first_token_s=7.0), NOW)
    assert not goals.is_late(row(1, NOW, num_tokens=40, first_token_s=7.0), NOW)
    assert not goals.is_late(row(1, NOW, first_token_s=None), NOW)


@pytest.mark.parametrize(("asked", "counted"), [(None, 0.1), (0.125, 0.125), (1e-300, 0.025), (1e300, 0.2)])
def test_a_goal_of_a_request_counts_within_limits(asked: float | None, counted: float) -> None:
    assert PaceGoals(make_view(), 0.1).of(row(0, 0.0, goals=Goals(tpot_s=asked))) == pytest.approx(counted)


@pytest.mark.parametrize(
    ("asked", "due"), [(None, 7.0), (0.5, 6.5), (1.0, 7.0), (1.5, 7.5), (1e-300, 6.25), (1e300, 8.0)]
)
def test_a_ttft_goal_moves_a_newcomer_by_what_it_differs_from_the_servers(asked: float | None, due: float) -> None:
    row = waiting(7, 40, goals=Goals(ttft_s=asked))
    assert row.order_key[1] == 7.0
    assert due_s(make_view(), row, 1.0) == due
    prices = Prices(step_s=0.3, lone_step_s=0.04, prefill_token_s=0.004)  # five times 0.2 s for 40 tokens
    assert due_s(make_view(prices=prices), row, None) == pytest.approx(due)


def test_newcomers_go_by_when_they_count_as_arrived() -> None:
    rows = [waiting(1, 40), waiting(2, 40, goals=Goals(ttft_s=1e-9)), waiting(3, 40, goals=Goals(ttft_s=1e9))]
    assert order(make_view(*rows, num_blocks=50)) == [1, 2, 3]  # nothing is priced
    assert order(make_view(*rows, num_blocks=50), ttft_goal_s=4.0) == [2, 1, 3]
    assert order(make_view(waiting(0, 40), *rows[1:], num_blocks=50), ttft_goal_s=2.0) == [0, 2, 3]


def test_looser_goals_need_less_of_the_device() -> None:
    def fits(tpot_s: float | None) -> bool:
        rows = [swapped(number, goals=Goals(tpot_s=tpot_s)) for number in range(18)]
        return PaceGoals(make_view(num_blocks=50, prices=PRICED), 0.03).fit_into(0.8, rows)

    assert fits(0.05)
    assert not fits(None)


def test_a_stream_that_generates_tokens_is_not_silent() -> None:
    assert longest_silence_s([stream(0, last_token_s=1.0)], NOW) == 0
    assert longest_silence_s([row(0, 2.0), row(1, 1.0)], NOW) == NOW - 1.0
    assert (
        longest_silence_s([prompt(0, 12, 11, num_prompt=8, last_token_s=1.0)], NOW) == NOW - 1.0
    )  # swapped in, without a new token yet


def test_priority_goes_before_arrival() -> None:
    assert order(make_view(waiting(0), waiting(1, order_key=(-1, 5.0, 1)))) == [1, 0]


# -- prompts are most of the work ------------------------------------------------------------------------------------


def test_where_prompts_are_most_of_the_work_newcomers_wait_in_line() -> None:
    rows = waiting(5, 8), stream(0), row(3, 9.0)
    view = make_view(*rows, prices=Prices(prompt_share=0.5), num_blocks=4)
    assert order(view, prompt_share=0.5) == [5, 0, 3]
    assert order(view, prompt_share=0.49) == [0, 3, 5]
    assert (rank(view, prompt_share=0.5).reason, rank(view, prompt_share=0.49).reason) == (None, Reason.PROMPT_BOUND)


def test_with_a_ttft_goal_of_the_operator_newcomers_still_rank_first() -> None:
    view = make_view(waiting(5, 8), stream(0), prices=Prices(prompt_share=0.9))
    assert order(view, ttft_goal_s=1.0) == [5, 0]
    assert rank(view, ttft_goal_s=1.0).reason is None


def test_when_prompt_bound_prompts_get_what_streams_leave_of_a_step() -> None:
    view = make_view(stream(0), prices=Prices(prompt_share=0.5))
    assert rank(view, prompt_share=0.5).caps_prompts
    assert not rank(view, prompt_share=0.49).caps_prompts
    assert rank(view, prompt_share=0.49).reason is None  # no request waits


# -- crowded ---------------------------------------------------------------------------------------------------------

CROWD = [swapped(0), row(1, 4.0), row(2, 9.0)]


def test_newcomers_wait_while_a_rotating_stream_has_been_silent_too_long() -> None:
    view = make_view(*CROWD, waiting(5), waiting(6), num_blocks=8)
    assert order(view, max_gap_s=6.0) == [5, 6, 0, 1, 2]
    assert order(view, max_gap_s=5.9) == [0, 1, 2, 5, 6]
    assert rank(view, max_gap_s=5.9).reason is Reason.CROWDED
    assert rank(view, max_gap_s=6.0).reason is None


def test_without_a_limit_in_seconds_the_most_silence_follows_the_tpot_goal() -> None:
    """48 tokens at the goal of 0.1 s (five times 20 ms): 4.8 s; on a machine half as fast, 9.6 s."""
    assert PaceGoals(make_view(prices=PRICED), None).most_silence_s(None) == pytest.approx(4.8)
    assert PaceGoals(make_view(prices=PRICED), None).most_silence_s(7.0) == 7.0
    slow = Prices(step_s=0.08, lone_step_s=0.04)
    views = {prices: make_view(*CROWD, waiting(5), num_blocks=8, prices=prices) for prices in (PRICED, slow)}
    assert [rank(view, max_gap_s=None).reason for view in views.values()] == [Reason.CROWDED, None]
    assert rank(make_view(*CROWD, waiting(5), num_blocks=8), max_gap_s=None).reason is None, "nothing is priced yet"
    assert rank(views[slow], max_gap_s=None, tpot_goal_s=0.1).reason is Reason.CROWDED, "a goal in seconds is one"


def test_a_silent_core_is_no_crowd() -> None:
    """A silent stream of the core waits for its copies, not for other streams' turns."""
    assert rank(make_view(swapped(0, last_token_s=0.0), waiting(5), num_blocks=50), max_gap_s=1.0).reason is None


def test_where_no_newcomer_waits_a_crowd_limits_nothing() -> None:
    view = make_view(*CROWD, prompt(5), num_blocks=8)
    assert order(view, max_gap_s=5.0) == [0, 1, 2, 5]
    assert rank(view, max_gap_s=5.0).reason is None


def test_newcomers_wait_one_by_one_when_swap_space_could_not_take_them_too() -> None:
    """Seven slots: three for what a rotating stream has not backed up, two for each newcomer; the core needs none."""
    rows = [stream(0), stream(1), *(waiting(number) for number in (5, 6, 7))]
    view = make_view(*rows, num_blocks=8, num_available_blocks=2, tiers=(host(num_free_slots=7),))
    assert order(view) == [5, 6, 0, 1, 7]
    assert rank(view).reason is Reason.SWAP_FULL
    assert order(make_view(*rows, tiers=view.tiers)) == [5, 6, 7, 0, 1]


def test_blocks_of_a_prompt_that_has_begun_need_one_slot_each() -> None:
    """Ten slots: two for a prompt's blocks, six for the rest of its 30 tokens, two for a newcomer of eight."""
    view = make_view(prompt(5, 30, 8), waiting(6), waiting(7), tiers=(host(num_free_slots=10),))
    assert order(view) == [5, 6, 7]
    assert rank(view).reason is Reason.SWAP_FULL
    assert rank(make_view(prompt(5, 30, 8), waiting(6), tiers=view.tiers)).reason is None


def test_what_a_prompt_in_swap_space_has_there_already_needs_no_slot() -> None:
    """Thirty tokens in eight blocks, two of them backed up: six slots, and two for a newcomer of eight."""
    begun = swapped(5, num_prompt=30, num_tokens=30, num_backed_blocks=2, last_token_s=None)
    view = make_view(begun, waiting(6), waiting(7), tiers=(host(num_free_slots=8),))
    assert order(view) == [5, 6, 7]
    assert rank(view).reason is Reason.SWAP_FULL
    assert rank(make_view(begun, waiting(6), tiers=view.tiers)).reason is None


def test_only_slots_of_quick_tiers_count() -> None:
    slow = host(block_s=1.0)
    view = make_view(waiting(5), tiers=(host(tier=Tier.PEER, num_free_slots=0), slow), prices=Prices(0.02, 0.001))
    assert rank(view).reason is Reason.SWAP_FULL


def test_a_prompt_that_has_begun_goes_on() -> None:
    view = make_view(prompt(5), waiting(6), tiers=(host(num_free_slots=0),))
    assert order(view) == [5, 6]


# -- slices ----------------------------------------------------------------------------------------------------------


def test_prompts_and_those_in_their_slice_stay() -> None:
    view = make_view(prompt(0, entered_step=1), stream(1, entered_step=96), stream(2, entered_step=97))
    assert rank(view, slice_steps=4).staying == {0, 2}


@pytest.mark.parametrize(("share", "steps"), [(0.3, 33), (0.6, 68)])
def test_a_slice_is_as_long_as_the_copies_of_the_rotation(share: float, steps: int) -> None:
    view = make_view(tiers=(host(block_s=0.02),), prices=Prices(step_s=0.02))
    assert rank(view, rotation_share=share).slice_steps == steps
    assert rank(view, rotation_share=share).reason is Reason.LINK_BUSY


def test_the_wide_part_is_no_wider_than_the_link_bears() -> None:
    """Six steps of 25 ms at 0.85 of the link carry 50 of 100 blocks, 2.55 ms each."""
    rows = [swapped(number) for number in range(30)]
    view = make_view(*rows, tiers=(host(block_s=0.00255),), prices=PRICED)
    assert len(parts(view, tpot_goal_s=1.0, slice_steps=3)[0]) == 16  # 50 blocks
    assert len(parts(view, tpot_goal_s=1.0, slice_steps=30)[0]) == 13  # 40 blocks
    assert rank(view, tpot_goal_s=1.0, rotation_share=0.3).slice_steps == 3


def test_loading_rotating_streams_are_ranked_with_the_others() -> None:
    on_its_way = row(1, 5.0, status=Status.LOADING)
    assert order(make_view(swapped(0), on_its_way, row(2, 4.0), num_blocks=5)) == [0, 2, 1]
