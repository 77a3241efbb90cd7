"""The default policy by example: who is newcomer, core or visitor, and in which order they go."""

from __future__ import annotations

import pytest

from floodplain.core.plan import Reason
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices, SequenceView, View
from floodplain.policy.paced import PacedPolicy, divide, longest_silence_s, pace_of
from floodplain.policy.ranking import Ranking
from floodplain.policy.settings import SharingSettings
from tests.support.views import host, make_view, prompt, stream, swapped, waiting

NOW = 10.0


def rank(view: View, **settings: object) -> Ranking:
    """Of a policy whose visitors may have half of the device."""
    return PacedPolicy(SharingSettings(**{"visitor_share": 0.5} | settings)).rank(view, NOW)  # type: ignore[arg-type]


def order(view: View, **settings: object) -> list[int]:
    return [row.seq_id for row in rank(view, **settings).rows]


def parts(view: View, *, now: float = 0.0, num_steps: int = 4, **settings: object) -> tuple[list[int], list[int]]:
    streams = sorted((*view.running, *view.loading, *view.swapped), key=lambda row: row.order_key)
    core, visitors = divide(view, streams, now, num_steps, SharingSettings(**settings))  # type: ignore[arg-type]
    return [row.seq_id for row in core], [row.seq_id for row in visitors]


def visitor(number: int, last_token_s: float, **fields: object) -> SequenceView:
    return swapped(number, last_token_s=last_token_s, **fields)


# -- the parts -------------------------------------------------------------------------------------------------------


def test_while_all_streams_fit_into_the_core_there_are_no_visitors() -> None:
    assert parts(make_view(*(stream(number) for number in range(5)), num_blocks=30)) == ([0, 1, 2, 3, 4], [])


def test_the_core_are_the_oldest_streams_that_fit_into_its_part() -> None:
    view = make_view(*(swapped(number) for number in range(20)), num_blocks=30)
    assert parts(view, visitor_share=0.3) == ([*range(7)], [*range(7, 20)])  # 21 blocks of three each
    assert parts(view, visitor_share=0.7) == ([0, 1, 2], [*range(3, 20)])


def test_a_stream_that_does_not_fit_ends_the_core() -> None:
    """By arrival: a small one does not pass a large one."""
    large = swapped(1, num_tokens=80)
    assert parts(make_view(swapped(0), large, swapped(2), swapped(3), num_blocks=30)) == ([0], [1, 2, 3])


def test_visitors_whose_pace_needs_less_than_their_part_leave_the_rest_to_the_core() -> None:
    """Steps of 25 ms and 8 tokens a second: each visitor is there for a fifth of the time."""
    view = make_view(*(swapped(number) for number in range(18)), num_blocks=50, prices=Prices(step_s=0.025))
    assert parts(view, visitor_share=0.3, pace=1e6) == ([*range(11)], [*range(11, 18)])
    assert parts(view, visitor_share=0.3, pace=8.0) == ([*range(15)], [*range(15, 18)])  # a tenth at least: 5 of 50


def test_a_slow_pace_still_means_two_turns_in_each_gap() -> None:
    """Turns of 5 steps and gaps of 1.25 s: 8 tokens a second, whatever the pace."""
    view = make_view(*(swapped(number) for number in range(18)), num_blocks=50, prices=Prices(step_s=0.025))
    for pace, max_gap_s in ((0.001, 1.25), (8.0, 1e9)):
        split = parts(view, visitor_share=0.4, slice_steps=5, pace=pace, max_gap_s=max_gap_s)
        assert split == parts(view, visitor_share=0.4, slice_steps=5, pace=8.0, max_gap_s=100.0)
    assert split != parts(view, visitor_share=0.4, slice_steps=5, pace=0.001, max_gap_s=0.5)


def test_once_one_of_them_is_overdue_visitors_get_all_that_they_may() -> None:
    """Overdue: silent for more than four fifths of six seconds, and here for all others nine tenths go to the core."""
    silent = [visitor(number, 5.2 if number == 17 else 9.0) for number in range(18)]
    view = make_view(*silent, num_blocks=50, prices=Prices(step_s=0.025))
    in_time, overdue = (parts(view, visitor_share=0.3, pace=0.001, max_gap_s=6.0, now=now) for now in (10.0, 10.1))
    assert in_time == ([*range(15)], [17, 15, 16])
    assert overdue == ([*range(11)], [17, *range(11, 17)])


def test_one_of_the_core_is_never_overdue() -> None:
    view = make_view(*(visitor(number, 0.0) for number in range(5)), num_blocks=50, prices=Prices(step_s=0.025))
    assert parts(view, visitor_share=0.3, now=10.0) == ([*range(5)], [])


def test_if_all_that_they_may_have_is_too_little_for_it_the_core_gives_way() -> None:
    """Twelve of 30 blocks for visitors; the one that is overdue needs 21: so the core's youngest leaves it room."""
    large = visitor(9, 0.0, num_tokens=80, num_backed_blocks=20)
    view = make_view(*(stream(number) for number in range(6)), large, num_blocks=30)
    assert parts(view, visitor_share=0.4, now=4.8)[0] == [*range(6)]
    assert parts(view, visitor_share=0.4, now=4.9) == ([0, 1, 2], [9, 3, 4, 5])


def test_while_no_step_is_priced_visitors_get_their_whole_part() -> None:
    view = make_view(*(swapped(number) for number in range(12)), num_blocks=30)
    assert parts(view, visitor_share=0.3, pace=0.001)[0] == [*range(7)]


# -- the order -------------------------------------------------------------------------------------------------------


def test_newcomers_go_before_the_core_and_the_core_before_visitors() -> None:
    streams = [visitor(number, 9.0) for number in range(4)]
    view = make_view(*streams, waiting(8), prompt(9), num_blocks=9)
    assert order(view) == [8, 9, 0, 1, 2, 3]


def test_among_visitors_the_one_that_has_been_silent_longest_goes_first() -> None:
    silent = [visitor(1, 7.0), visitor(2, 9.0), visitor(3, 6.0), visitor(4, 7.0)]
    assert order(make_view(swapped(0), *silent, num_blocks=5)) == [0, 3, 1, 4, 2]


def test_among_visitors_with_goals_of_their_own_the_one_that_has_missed_most_tokens_goes_first() -> None:
    silent = [visitor(1, 4.0), visitor(2, 7.0, pace=12.0), visitor(3, 3.0, pace=4.0), visitor(4, 9.0)]
    view = make_view(swapped(0), *silent, num_blocks=5)
    assert order(view, pace=5.0) == [0, 2, 1, 3, 4]  # 36 tokens at 12 a second, 30 at 5, 28 at 4, 5 at 5


@pytest.mark.parametrize(("asked", "counted"), [(None, 8.0), (10.0, 10.0), (1e300, 32.0), (1e-300, 4.0)])
def test_a_goal_counts_within_limits(asked: float | None, counted: float) -> None:
    assert pace_of(visitor(0, 0.0, pace=asked), SharingSettings(pace=8.0, max_gap_s=1e9)) == counted


def test_a_slow_goal_still_means_two_turns_in_each_gap() -> None:
    assert pace_of(visitor(0, 0.0, pace=1.0), SharingSettings(pace=8.0, slice_steps=5, max_gap_s=1.25)) == 8.0


def test_slower_goals_need_less_of_the_pool() -> None:
    """Steps of 25 ms: at 8 tokens a second each visitor is there for a fifth of the time, at 16 for two fifths."""

    def num_visitors(pace: float | None) -> int:
        view = make_view(
            *(swapped(number, pace=pace) for number in range(18)), num_blocks=50, prices=Prices(step_s=0.025)
        )
        return len(parts(view, visitor_share=0.5, pace=8.0, max_gap_s=1e9)[1])

    assert num_visitors(4.0) < num_visitors(16.0)
    assert num_visitors(None) == num_visitors(8.0)


def test_a_visitor_that_speaks_is_not_silent() -> None:
    assert longest_silence_s([stream(0, last_token_s=1.0)], NOW) == 0
    assert longest_silence_s([visitor(0, 2.0), visitor(1, 1.0)], NOW) == NOW - 1.0
    assert (
        longest_silence_s([prompt(0, 12, 11, num_prompt=8, last_token_s=1.0)], NOW) == NOW - 1.0
    )  # back, not yet heard


def test_priority_goes_before_arrival() -> None:
    assert order(make_view(waiting(0), waiting(1, order_key=(-1, 5.0, 1)))) == [1, 0]


# -- prompts are most of the work ------------------------------------------------------------------------------------


def test_where_prompts_are_most_of_the_work_newcomers_wait_in_line() -> None:
    rows = waiting(5, 8), stream(0), visitor(3, 9.0)
    view = make_view(*rows, prices=Prices(prompt_share=0.5), num_blocks=4)
    assert order(view, prompt_share=0.5) == [5, 3, 0]
    assert order(view, prompt_share=0.49) == [3, 0, 5]
    assert (rank(view, prompt_share=0.5).reason, rank(view, prompt_share=0.49).reason) == (None, Reason.PROMPT_BOUND)


def test_and_get_what_streams_leave_of_a_step() -> None:
    view = make_view(stream(0), prices=Prices(prompt_share=0.5))
    assert rank(view, prompt_share=0.5).caps_prompts
    assert not rank(view, prompt_share=0.49).caps_prompts
    assert rank(view, prompt_share=0.49).reason is None  # nobody waits


# -- crowded ---------------------------------------------------------------------------------------------------------

CROWD = [swapped(0), visitor(1, 4.0), visitor(2, 9.0)]


def test_newcomers_wait_while_somebody_has_been_silent_too_long() -> None:
    view = make_view(*CROWD, waiting(5), waiting(6), num_blocks=8)
    assert order(view, max_gap_s=6.0) == [5, 6, 0, 1, 2]
    assert order(view, max_gap_s=5.9) == [0, 1, 2, 5, 6]
    assert rank(view, max_gap_s=5.9).reason is Reason.CROWDED
    assert rank(view, max_gap_s=6.0).reason is None


def test_who_is_behind_least_may_have_been_silent_longest() -> None:
    crowd = [swapped(0), visitor(1, 4.0, pace=1.0), visitor(2, 6.0)]
    view = make_view(*crowd, waiting(5), num_blocks=8)
    assert order(view, max_gap_s=5.9, pace=3.0) == [0, 2, 1, 5]
    assert rank(view, max_gap_s=5.9, pace=3.0).reason is Reason.CROWDED


def test_a_silent_core_is_no_crowd() -> None:
    """Who is silent there waits for its copies, and not for others' turns."""
    assert rank(make_view(swapped(0, last_token_s=0.0), waiting(5), num_blocks=50), max_gap_s=1.0).reason is None


def test_without_newcomers_there_is_no_crowd() -> None:
    assert rank(make_view(*CROWD, num_blocks=5), max_gap_s=1.0).reason is None


def test_where_no_newcomer_waits_a_crowd_limits_nothing() -> None:
    view = make_view(*CROWD, prompt(5), num_blocks=8)
    assert order(view, max_gap_s=5.0) == [0, 1, 2, 5]
    assert rank(view, max_gap_s=5.0).reason is None


def test_newcomers_wait_one_by_one_when_swap_space_could_not_take_them_too() -> None:
    """Seven slots: three for what a visitor has not backed up, two for each newcomer; the core needs none."""
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
    """Thirty tokens in eight blocks, two of which lie there: six slots, and two for a newcomer of eight."""
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
def test_a_slice_is_as_long_as_the_copies_of_the_visitors_part(share: float, steps: int) -> None:
    view = make_view(tiers=(host(block_s=0.02),), prices=Prices(step_s=0.02))
    assert rank(view, visitor_share=share).slice_steps == steps
    assert rank(view, visitor_share=share).reason is Reason.LINK_BUSY


def test_loading_visitors_are_ranked_with_the_others() -> None:
    on_its_way = visitor(1, 5.0, status=Status.LOADING)
    assert order(make_view(swapped(0), on_its_way, visitor(2, 4.0), num_blocks=5)) == [0, 2, 1]
