"""``timely`` by example: which requests are admitted, wait in line, or must be on the device."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from floodplain.core.plan import Reason
from floodplain.core.request import Goals
from floodplain.core.view import Demand, Prices, SequenceView, View
from floodplain.policy.deadlines import LINE_GRACE_S, Deadlines
from floodplain.policy.ranking import Ranking
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SLICE_STEPS, settings_for
from floodplain.policy.timely import MOST_HEADS, TimelyPolicy
from tests.support.views import host, make_view, prompt, stream, swapped, waiting

NOW = 100.0
TTFT_S, TPOT_S, GAP_S = 1.0, 0.1, 6.0
PRICES = Prices(step_s=0.02, prefill_token_s=0.001, lone_step_s=0.02)
DEMAND = Demand(mean_output=40, median_prompt=8, end_rate=10.0, longest_wait_s=20.0, step_s=0.02)
GOALS: dict[str, Any] = {"ttft_goal_s": TTFT_S, "tpot_goal_s": TPOT_S, "max_gap_s": GAP_S}


def late(number: int, arrival_s: float, **fields: object) -> SequenceView:
    """A waiting request too late for its TTFT goal."""
    return arrived(waiting(number, **fields), arrival_s)


def arrived(row: SequenceView, arrival_s: float, priority: int = 0) -> SequenceView:
    return replace(row, order_key=(priority, arrival_s, row.seq_id))


def in_time(row: SequenceView, slack_s: float, silence_s: float = 0.5, num_tokens: int = 4) -> SequenceView:
    """A stream whose first token was in time, with so much slack."""
    first_s = NOW + slack_s - num_tokens * TPOT_S
    row = replace(row, first_token_s=first_s, last_token_s=NOW - silence_s, num_tokens=row.num_prompt + num_tokens)
    return arrived(row, first_s - 0.5)


def line(*rows: SequenceView, **fields: object) -> View:
    """A view with prices and demand; with ``OLD`` in it, the device is not shared."""
    return make_view(*rows, **({"prices": PRICES, "demand": DEMAND, "num_blocks": 400} | fields))


def rank(view: View, **settings: object) -> Ranking:
    return TimelyPolicy(settings_for("timely", **(GOALS | settings))).rank(view, NOW)


def order(view: View, **settings: object) -> list[int]:
    return [row.seq_id for row in rank(view, **settings).rows]


OLD = late(90, NOW - 5.0)
"""A request in line whose deadline is far."""
FULL = [in_time(stream(number), 0.0, num_tokens=470) for number in range(10, 15)]
"""They claim all of a device of 100 blocks: each 120 blocks for a fifth of the time."""


def test_while_waits_are_short_and_goals_fit_requests_share_the_device() -> None:
    rows = [in_time(swapped(1), 0.5), arrived(waiting(2), NOW - 0.1)]
    view = line(*rows)
    policy = TimelyPolicy(settings_for("timely", **GOALS))
    assert policy.rank(view, NOW) == policy._paced.rank(view, NOW)
    assert policy.rank(line(*rows, OLD), NOW) != policy._paced.rank(line(*rows, OLD), NOW)
    assert rank(replace(view, num_blocks=15), tpot_goal_s=0.02).slice_steps == 10  # they do not fit


def test_newcomers_on_time_rank_before_the_line() -> None:
    view = line(OLD, arrived(waiting(1), NOW - 0.2), arrived(waiting(2), NOW - 0.1), in_time(stream(3), 0.0))
    assert order(view) == [3, 1, 2, 90]  # a stream without slack first


def test_a_newcomer_whose_prompt_would_end_too_late_is_in_line() -> None:
    long_prompt = arrived(waiting(1, 1500), NOW - 0.1)
    view = line(OLD, long_prompt, arrived(waiting(2), NOW), num_blocks=2000, num_available_blocks=0)
    assert order(view) == [2, 1, 90]  # backfilled, the youngest first
    behind = [arrived(waiting(number, 600), NOW) for number in (1, 2)]
    assert order(line(OLD, *behind, num_blocks=2000)) == [1, 90]  # 0.6 s each: the second would not be done in time


def test_admissions_fill_the_device_and_no_more() -> None:
    """Each claims 10 of 41 blocks, its prompt and most of a mean answer, for step time over goal, 0.2."""
    fresh = [arrived(waiting(number), NOW) for number in range(1, 40)]
    admitted = rank(line(OLD, *fresh, num_blocks=41))
    assert len([row for row in admitted.rows if row.seq_id < 90]) == 18  # 0.9 of the device
    assert admitted.reason is Reason.PROMISED


def test_the_slack_of_a_long_answer_is_for_a_third_of_the_mean_at_least() -> None:
    """40 tokens in the mean: 13 more are expected of one that has 400; each takes 20 ms, a block has 4 tokens."""
    deadlines = Deadlines(line(), NOW, settings_for("timely", **GOALS), 13)
    row = in_time(stream(1), 1.0, num_tokens=400)
    part = -(-(row.num_prompt + 401) // 4) / 400
    assert deadlines.stand(row)[3] == pytest.approx(0.02 / (TPOT_S + 1.0 / (40 / 3)) * part)


def test_streams_are_judged_by_their_own_goals() -> None:
    deadlines = Deadlines(line(), NOW, settings_for("timely", **GOALS), 13)
    row = in_time(stream(1), 1.0)  # its first token came after 0.5 s; four tokens
    assert deadlines.stand(row)[0] == pytest.approx(1.0) and deadlines.stand(row)[2]
    assert deadlines.stand(replace(row, goals=Goals(tpot_s=0.2)))[0] == pytest.approx(1.4)
    assert not deadlines.stand(replace(row, goals=Goals(ttft_s=0.4)))[2]
    assert not deadlines.stand(arrived(row, NOW - 3.0))[2]


def test_a_stream_that_decodes_is_not_silent_and_one_without_a_time_began_just_now() -> None:
    deadlines = Deadlines(line(), NOW, settings_for("timely", **GOALS), 13)
    row = in_time(stream(1), 1.0, silence_s=5.0)
    assert deadlines.stand(replace(row, is_decoding=False))[1] == 5.0
    assert deadlines.stand(replace(row, is_decoding=True, since_step=line().step))[1] == 0.0
    begun = replace(row, first_token_s=None, last_token_s=None)  # three steps of 20 ms ago
    assert deadlines.stand(begun)[:2] == (pytest.approx(4 * TPOT_S - 3 * 0.02), 0.0)


@pytest.mark.parametrize(
    ("other", "is_crowded"),
    [
        (in_time(swapped(1), 0.3), True),  # swapped, and about to miss its goal
        (in_time(stream(1), 0.3), False),  # on the device
        (in_time(swapped(1), 3.0), False),
        (in_time(swapped(1), 3.0, silence_s=0.9 * GAP_S), True),
        (in_time(swapped(1), -5.0), False),  # has missed it
    ],
)
def test_while_the_device_is_crowded_no_newcomer_is_admitted(other: SequenceView, is_crowded: bool) -> None:
    ranking = rank(line(OLD, other, arrived(waiting(2), NOW)))
    assert (2 not in [row.seq_id for row in ranking.rows]) is is_crowded
    assert (ranking.reason is Reason.CROWDED) is is_crowded


def keyed(row: SequenceView, client: str) -> SequenceView:
    return replace(row, client=client)


@pytest.mark.parametrize(("client", "is_admitted"), [("light", True), ("heavy", False)])
def test_while_the_device_is_crowded_only_a_key_that_is_behind_is_admitted(client: str, is_admitted: bool) -> None:
    """Its newcomer ranks before urgent streams of the key that is ahead."""
    losing = keyed(in_time(swapped(1), 0.3), "heavy")
    urgent = keyed(in_time(stream(2), 0.1), "heavy")
    fresh = keyed(arrived(waiting(3), NOW), client)
    credits = {"light": 0.0, "heavy": 500.0}
    assert order(line(OLD, losing, urgent, fresh, key_credits=credits))[:3] == (
        [3, 2, 1] if is_admitted else [2, 1, 90]
    )
    for even in ({"light": 500.0, "heavy": 500.0}, {client: 0.0}):  # equal keys, and one key alone
        assert 3 not in order(line(OLD, losing, urgent, fresh, key_credits=even))


def test_newcomers_of_the_key_that_was_served_least_rank_first() -> None:
    fresh = [keyed(arrived(waiting(1), NOW - 0.2), "ahead"), keyed(arrived(waiting(2), NOW - 0.1), "behind")]
    assert order(line(OLD, *fresh, key_credits={"ahead": 10.0, "behind": 0.0}))[:2] == [2, 1]
    assert order(line(OLD, *fresh, key_credits={"ahead": 0.0, "behind": 10.0}))[:2] == [1, 2]


def test_if_keys_claim_too_much_the_youngest_of_the_largest_count_as_late() -> None:
    """Five streams claim all of the device; one of another key claims as much as each of them."""
    large = [keyed(row, "large") for row in FULL]
    small = keyed(in_time(stream(20), 0.0, num_tokens=470), "small")
    keys = {"large": 0.0, "small": 0.0}
    ranked = order(line(OLD, *large, small, num_blocks=100, key_credits=keys))
    youngest = max(large, key=lambda row: row.order_key)
    assert ranked.index(youngest.seq_id) == len(large) > ranked.index(small.seq_id)
    assert sorted(ranked[:5]) == sorted({row.seq_id for row in (*large, small)} - {youngest.seq_id})
    slack = [keyed(in_time(stream(number), 1.0, num_tokens=470), "large") for number in range(10, 20)]
    ranked = order(line(OLD, *slack, small, num_blocks=100, key_credits=keys))
    assert sorted(ranked) == sorted({*ranked}) and ranked.index(19) > ranked.index(small.seq_id)


def test_several_keys_share_the_device_until_a_wait_of_half_a_goal() -> None:
    policy = TimelyPolicy(settings_for("timely", **GOALS))
    for wait_s, keys, shares in ((0.4, 2, True), (0.6, 2, False), (0.6, 1, True)):
        credits = {str(number): 0.0 for number in range(keys)}
        view = line(in_time(swapped(1), 0.5), arrived(waiting(2), NOW - wait_s), key_credits=credits)
        assert (policy.rank(view, NOW) == policy._paced.rank(view, NOW)) is shares


def test_without_swap_space_a_stream_claims_the_device_for_all_of_its_time() -> None:
    settings = settings_for("timely", **GOALS)
    turns, none = (Deadlines(line(tiers=tiers), NOW, settings, 13) for tiers in ((host(),), ()))
    row = in_time(stream(1), 0.0)
    assert none.stand(row)[3] == pytest.approx(turns.stand(row)[3] * TPOT_S / PRICES.step_s)


def test_without_swap_space_newcomers_rank_first_and_no_victim_is_chosen() -> None:
    policy = make_policy("timely", settings_for("timely", **GOALS))
    rows = [OLD, arrived(waiting(1), NOW), in_time(stream(3), 5.0)]
    for num_free, admitted in ((8, [1]), (2, [])):
        view = line(*rows, tiers=(), num_waiting=3, num_blocks=60, num_available_blocks=num_free)
        decision = policy.decide(view, NOW, Random(0))
        assert [chunk.seq_id for chunk in decision.admissions][:1] == admitted
        assert not decision.preemptions and decision.decodes == (3,)
        assert decision.reason is Reason.NO_SWAP


def test_prompts_are_long_if_several_take_longer_than_the_goal() -> None:
    policy = TimelyPolicy(settings_for("timely", **GOALS))
    half = prompt(1, 508, 8)  # 0.5 s are left
    assert policy.has_long_prompts(line(half, waiting(2, 501)))
    assert not policy.has_long_prompts(line(half, waiting(2, 499)))
    assert not policy.has_long_prompts(line(prompt(1, 5000, 8), stream(2)))  # one alone has no order


def test_while_goals_fit_long_prompts_are_computed_by_deadlines_and_no_request_waits_in_line() -> None:
    policy = TimelyPolicy(settings_for("timely", **GOALS))
    too_long, due_last, due_first = (
        arrived(waiting(1, 1500), NOW - 0.3),
        arrived(waiting(2, 600), NOW - 0.2),
        replace(arrived(waiting(3), NOW - 0.1), goals=Goals(ttft_s=0.7)),
    )
    beside = [in_time(stream(4), 3.0, num_tokens=40), in_time(swapped(5), 3.0)]
    view = line(too_long, due_last, due_first, *beside, num_blocks=2000)
    shared, ranking = policy._paced.rank(view, NOW), policy.rank(view, NOW)
    assert [row.seq_id for row in shared.rows] == [3, 1, 2, 4, 5]
    assert [row.seq_id for row in ranking.rows] == [3, 2, 1, 4, 5]
    assert replace(ranking, rows=shared.rows) == shared
    first = arrived(too_long, NOW - 0.3, priority=-1)
    assert policy.rank(line(first, due_last, due_first, num_blocks=2000), NOW).rows[0] is first
    short = line(arrived(waiting(1), NOW - 1.5), arrived(waiting(2), NOW), *beside, num_blocks=2000)
    assert policy.rank(short, NOW) == policy._paced.rank(short, NOW)  # the late one first, since it arrived first


@pytest.mark.parametrize(("num_prompt", "num_others", "shares"), [(600, 1, True), (600, 12, False), (8, 12, True)])
def test_with_long_prompts_the_device_is_shared_if_those_of_the_next_seconds_fit_too(
    num_prompt: int, num_others: int, shares: bool
) -> None:
    """An arrival claims one of 8 places for 0.2 of the time; four times the last second's are expected."""
    rows = [arrived(waiting(number, num_prompt), NOW - 0.1) for number in (1, 2)]
    others = [arrived(waiting(number), NOW) for number in range(3, 3 + num_others)]
    view = line(*rows, *others, num_blocks=2000, max_num_seqs=8)
    assert rank(view).slice_steps == (SLICE_STEPS["paced"] if shares else SLICE_STEPS["timely"])


def test_long_prompts_without_swap_space_limit_no_step_while_all_fit() -> None:
    policy = make_policy("timely", settings_for("timely", **GOALS))
    rows = [arrived(prompt(1, 3000, 8), NOW - 1.0), arrived(waiting(2), NOW)]
    decision = policy.decide(line(*rows, tiers=(), num_blocks=2000), NOW, Random(0))
    assert [chunk.seq_id for chunk in decision.admissions] == [2] and decision.reason is None


def test_a_tight_line_keeps_newcomers_out_until_its_head_has_room() -> None:
    """At 10 ends per second 230 places need 23 s, which is FCFS's wait with patience and grace."""
    due_s = 1.1 * DEMAND.longest_wait_s + LINE_GRACE_S
    head, fresh = late(80, NOW - due_s + 0.05), arrived(waiting(1), NOW)
    almost = FULL[:4]  # leaves 0.2 of the device
    assert order(line(head, fresh, *almost, num_blocks=100))[4:] == [1, 80]
    large = replace(head, num_prompt=400, num_tokens=400)
    assert order(line(large, fresh, *almost, num_blocks=100)) == [10, 11, 12, 13]
    assert order(line(arrived(large, NOW - due_s + 0.5), fresh, *almost, num_blocks=100))[4:] == [1]  # it is not tight


def test_a_head_whose_deadline_has_come_is_admitted_whatever_is_claimed() -> None:
    due_s = 1.1 * DEMAND.longest_wait_s + LINE_GRACE_S
    losing = in_time(swapped(20), 0.1)
    heads = [late(60 + number, NOW - due_s - 0.1) for number in range(12)]
    ranked = order(line(*heads, arrived(waiting(1), NOW), *FULL, losing, num_blocks=100))
    assert [number for number in ranked if number >= 60] == [*range(60, 60 + MOST_HEADS)]
    assert ranked.index(60) > ranked.index(20) and 1 not in ranked


def test_the_patience_of_the_line_moves_its_deadlines() -> None:
    view = line(late(80, NOW - 22.0), *FULL, num_blocks=100)
    assert 80 in order(view, line_patience=1.0)
    assert 80 not in order(view, line_patience=2.0)


def test_places_that_are_not_seen_count_between_the_first_and_the_newest() -> None:
    rows = [late(number, NOW - 20.0 + number / 1000) for number in range(70)]
    demand = replace(DEMAND, end_rate=100.0)
    seen = line(*rows, num_waiting=70, demand=demand, num_blocks=10)
    hidden = replace(seen, num_waiting=700)
    assert not {*order(seen)} & {*range(8)} and {*range(8)} <= {*order(hidden)}


def test_room_that_is_left_goes_to_the_young_end_of_the_line_by_priority() -> None:
    rows = [late(1, NOW - 8.0), late(2, NOW - 6.0), arrived(late(3, 0.0), NOW - 7.0, priority=-1)]
    assert order(line(*rows, num_available_blocks=0)) == [3, 2, 1]
    assert order(line(*rows)) == [3, 1, 2]  # by arrival, since all fit into the pool


def test_on_the_device_silent_and_urgent_streams_rank_first_late_ones_last() -> None:
    overdue = in_time(swapped(1), 3.0, silence_s=0.84 * GAP_S)
    less_overdue = in_time(swapped(0), 3.0, silence_s=0.82 * GAP_S, num_tokens=9)  # it arrived first
    urgent, more_urgent = in_time(stream(2), 0.2, num_tokens=9), in_time(stream(3), 0.1)  # the former arrived first
    young, old = in_time(stream(4), 2.0, num_tokens=30), in_time(stream(5), 2.0, num_tokens=50)
    lost = in_time(stream(6), -5.0)
    begun = arrived(prompt(7), NOW - 0.2)
    ranking = rank(line(OLD, overdue, less_overdue, urgent, more_urgent, young, old, lost, begun))
    assert [row.seq_id for row in ranking.rows] == [1, 0, 3, 2, 7, 5, 4, 6, 90]
    assert 7 in ranking.staying


def test_a_stream_on_the_device_is_not_preempted_for_another_one_that_has_slack_too() -> None:
    """The swapped stream is the older one; it ranks first as soon as it is urgent."""
    old, young = in_time(swapped(1), 2.0, num_tokens=50), in_time(stream(2), 2.0, num_tokens=30)
    assert order(line(OLD, old, young)) == [2, 1, 90]
    assert order(line(OLD, in_time(swapped(1), 0.2, num_tokens=50), young)) == [1, 2, 90]


def test_goals_follow_steps_without_copies() -> None:
    """Five times what a token, and what a median prompt with its token, take without load."""
    slowed = replace(PRICES, lone_step_s=0.04, unloaded_step_s=0.02)
    deadlines = Deadlines(line(OLD, prices=slowed), NOW, settings_for("timely"), 10)
    assert deadlines.ttft_goal_s == pytest.approx(5 * (0.02 + 8 * 0.001))
    assert deadlines.stand(in_time(stream(1), 0.0, num_tokens=4))[0] == pytest.approx(4 * 5 * 0.02 - 4 * TPOT_S)
    unknown = Deadlines(line(OLD, prices=PRICES), NOW, settings_for("timely"), 10)  # copies beside all steps so far
    assert unknown.ttft_goal_s == deadlines.ttft_goal_s


def test_a_late_stream_ranks_before_those_with_slack_when_its_end_is_due() -> None:
    ending = arrived(in_time(stream(1), -5.0), NOW - 60.0)
    assert order(line(OLD, ending, in_time(stream(2), 2.0)))[:2] == [1, 2]
    assert order(line(OLD, arrived(ending, NOW - 8.0), in_time(stream(2), 2.0)))[:2] == [2, 1]


def test_newcomers_wait_while_swap_space_has_no_room_beside_a_turn() -> None:
    """Slots for a turn's 30 blocks, and two for its prompt."""
    rows = [OLD, arrived(waiting(1), NOW), *FULL[:4]]
    assert 1 not in order(line(*rows, num_blocks=100, tiers=(host(num_free_slots=31),)))
    assert 1 in order(line(*rows, num_blocks=100, tiers=(host(num_free_slots=32),)))


def test_prompts_in_time_get_what_they_need_others_what_keeps_steps_short() -> None:
    few, many = (rank(line(OLD, arrived(prompt(1, number, 0), NOW), num_blocks=2000)) for number in (8, 700))
    assert few.prefill_share is not None and many.prefill_share is not None
    assert few.prefill_share == pytest.approx(min(0.9, 0.28 / 0.3))
    assert many.prefill_share == pytest.approx(min(0.9, 0.7 / 0.72))
    assert rank(line(OLD, prices=Prices())).prefill_share is None


def test_only_prompts_on_the_device_may_miss_goals_by_the_error_of_prices() -> None:
    deadlines = Deadlines(line(), NOW, settings_for("timely", **GOALS), 13)
    for row, is_in_time in ((waiting(1, 790), False), (prompt(1, 790, 0), True), (prompt(1, 810, 0), False)):
        assert deadlines.can_begin_in_time(arrived(row, NOW - 0.2)) is is_in_time  # 0.02 s, and 1 ms a token


def test_a_late_request_claims_a_turn_in_each_gap_at_least() -> None:
    """A turn of 13 steps of 20 ms in 0.8 of 6 s, for one of 64 places; its end is due so late that it needs less."""
    deadlines = Deadlines(line(), NOW, settings_for("timely", **GOALS), 13)
    assert deadlines.late_claim(arrived(waiting(1), NOW)) == pytest.approx(13 * 0.02 / (0.8 * GAP_S) / 64)
    assert deadlines.late_claim(arrived(waiting(1), NOW - 60.0)) == pytest.approx(1 / 64)  # it is due


def test_the_part_of_a_step_for_prompts_is_that_of_the_ranking() -> None:
    """0.3 of the TTFT goal less a decode step of 20 ms, at 1 ms a token; ``--policy paced`` would give 20 tokens."""
    rows = [in_time(stream(1), 2.0, num_tokens=30), arrived(prompt(2, 3000, 0), NOW - 1.0)]
    view = line(OLD, *rows, num_blocks=2000, max_batched_tokens=4000)
    (chunk,) = TimelyPolicy(settings_for("timely", **GOALS)).decide(view, NOW, Random(0)).chunks
    assert (chunk.seq_id, chunk.num_tokens) == (2, 180)
