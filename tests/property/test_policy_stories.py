"""Policies that take turns, in random stories: every request is served, and every block is freed.

Laws: every request that is not aborted gets the tokens of an undisturbed run; ledgers balance after every call; each
decision is possible; something runs while requests are live, and all comes to rest within a bound; swap space ends
empty. Long stories have twice as many requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.plan import Decision, Reason
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.fair import FairPolicy
from floodplain.policy.gate import GatedPolicy
from floodplain.policy.paced import STEPS_BESIDE
from floodplain.policy.ranking import Ranking, live_rows, slice_for
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from floodplain.policy.swap import SwapBudget
from floodplain.policy.turn import _Turn
from tests.support.bursts import Machine, Recorder, begin, burst, make_burst
from tests.support.controls import Controls, Fault
from tests.support.examples import examples
from tests.support.turns import Story, Teller, make_story

SEEDS = st.integers(0, 2**32)
SHARING = ["cfs", "fair", "paced", "timely"]


@pytest.mark.parametrize(
    ("policy", "is_synchronous"),
    [("fcfs", False), *product(SHARING, [False, True])],
)
def test_every_story_ends_well(policy: str, is_synchronous: bool) -> None:
    @settings(max_examples=examples(3))
    @given(seed=SEEDS)
    def law(seed: int) -> None:
        story = make_story(seed, policy, max_requests=12)
        if is_synchronous:
            sharing = replace(story.settings, is_synchronous=True)
            story = replace(story, settings=sharing, machine=replace(story.machine, num_slots=60))
        Teller(story).tell()

    law()


# -- laws of single decisions ----------------------------------------------------------------------------------------


def decided(story: Story) -> Iterator[tuple[SharingPolicy, View, float, Decision]]:
    """Yield each decision of the policy behind the gate, with the policy itself."""
    gated = make_policy(story.policy, story.settings)
    assert isinstance(gated, GatedPolicy)
    recorder = Recorder(gated._inner)
    Teller(story, recorder).tell()
    for view, now, decision in recorder.seen:
        yield gated._inner, view, now, decision


def turned_out(view: View, decision: Decision) -> list[SequenceView]:
    rows = {row.seq_id: row for row in view.running}
    return [rows[order.seq_id] for order in decision.preemptions if order.reason is Reason.SLICE_ENDED]


def most_copied(view: View) -> int:
    """Return the slots that a swap-out of all resident requests needs."""
    return sum(max(0, row.num_blocks - row.num_backed_blocks) for row in view.running)


def doubled(number: int) -> Iterator[int]:
    return (number * 2**exponent for exponent in count())


@settings(max_examples=examples(6))
@given(SEEDS, st.sampled_from(SHARING))
def test_no_turn_ends_before_its_slice_is_over(seed: int, policy: str) -> None:
    """A ``cfs`` slice is common to all: it ends at multiples of its steps or early. Others begin with the stay."""
    for inner, view, _, decision in decided(make_story(seed, policy, max_requests=10)):
        share, beside = (inner.settings.rotation_share, STEPS_BESIDE) if policy == "paced" else (1.0, 0)
        num_steps = slice_for(view, int(share * view.num_blocks), inner.settings, beside).steps
        for row in turned_out(view, decision):
            assert view.step > row.entered_step
            if policy == "cfs":
                num_steps = next(steps for steps in doubled(inner.settings.slice_steps) if steps >= num_steps)
                assert view.step % num_steps == 0 or view.step == view.completion_step
            else:
                assert view.step >= row.entered_step + num_steps


@settings(max_examples=examples(6))
@given(SEEDS, st.sampled_from(SHARING))
def test_requests_enter_the_device_in_the_order_of_the_ranking(seed: int, policy: str) -> None:
    """No request enters before a higher-ranked one that could enter, too.

    Exceptions: the step has no token for it, its room is kept (``refills``), another request fetches its prefix, or a
    newcomer finds no swap space for victims. AQUA's switch begins no prompt beside copies.
    """
    story = make_story(seed, policy, max_requests=10)
    story = replace(story, settings=replace(story.settings, is_synchronous=False))
    for inner, view, now, decision in decided(story):
        came = {order.seq_id for order in (*decision.resumptions, *decision.admissions)}
        gone = {order.seq_id for order in decision.preemptions}
        ranking = inner.rank(view, now)
        rows = [row for row in ranking.rows if row.status in (Status.WAITING, Status.SWAPPED)]
        places = [place for place, row in enumerate(rows) if row.seq_id in came]
        num_prompt = sum(chunk.num_tokens for chunk in (*decision.chunks, *decision.admissions))
        is_step_full = num_prompt > 0 or len(view.running) >= view.max_batched_tokens
        brought = {row.next_copy for row in rows if row.seq_id in came} - {None}
        is_swap_full = all(tier.num_free_slots < most_copied(view) for tier in view.tiers)
        for row in rows[: max(places, default=0)]:
            waits_for_room = ranking.refills and (gone or view.num_draining_blocks)
            has_no_token = row.status is Status.WAITING and (is_step_full or is_swap_full)
            has_lost_room = gone and row.num_shared_blocks
            waits_for_copy = row.is_leaving or row.is_arriving or row.next_copy in brought
            assert row.seq_id in came or waits_for_copy or has_no_token or waits_for_room or has_lost_room


@settings(max_examples=examples(6))
@given(SEEDS, st.sampled_from(SHARING))
def test_a_turn_ends_only_for_a_request_that_ranks_above(seed: int, policy: str) -> None:
    for inner, view, now, decision in decided(make_story(seed, policy, max_requests=10)):
        place = {row.seq_id: number for number, row in enumerate(inner.rank(view, now).rows)}
        waits = [row.seq_id for row in (*view.swapped, *view.waiting)]
        for row in turned_out(view, decision):
            assert min(place[seq_id] for seq_id in waits) < place[row.seq_id]


@settings(max_examples=examples(6))
@given(SEEDS, st.sampled_from(SHARING))
def test_no_slot_is_promised_twice(seed: int, policy: str) -> None:
    """Slots for swap-outs, for backups written behind, and of fetched prefixes, which count as free slots."""
    for _, view, _, decision in decided(make_story(seed, policy, max_requests=12)):
        rows = {row.seq_id: row for row in (*view.running, *view.waiting)}
        for tier in view.tiers:
            leaving = [rows[order.seq_id] for order in decision.preemptions if order.tier is tier.tier]
            needed = sum(max(0, row.num_blocks - row.num_backed_blocks) for row in leaving)
            needed += sum(order.num_blocks for order in decision.backups if order.tier is tier.tier)
            fetched = [rows[order.seq_id] for order in decision.resumptions if order.reason is Reason.PREFIX_IN_SWAP]
            assert needed + sum(row.num_backed_blocks for row in fetched) <= tier.num_free_slots or not needed


# -- found by these stories, and fixed -------------------------------------------------------------------------------


SYSTEM = Machine(num_blocks=16, num_slots=400, block_s=0.0, max_batched_tokens=32)


@pytest.mark.parametrize("policy", SHARING)
@pytest.mark.parametrize("caches", [True, False])
def test_blocks_shared_with_victims_do_not_count_as_resident(policy: str, caches: bool) -> None:
    """Holders of a shared system prompt are preempted in the step that admits requests which share it."""
    machine = replace(SYSTEM, caches_prefixes=caches)
    requests = make_burst(16, interval_s=0.01, num_prompt=20, num_shared=16)
    burst(machine, make_policy(policy, SharingSettings(slice_steps=2)), requests)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("cfs", SharingSettings()), ("fair", SharingSettings(fair_by="key"))],
)
def test_prompts_longer_than_a_slice_are_no_livelock(policy: str, settings: SharingSettings) -> None:
    """Swap space holds 3 blocks, so most is recomputed, and no slice is long enough for a prompt."""
    settings = replace(settings, slice_steps=1)
    machine = Machine(num_blocks=10, num_slots=3, max_batched_tokens=3)
    requests = make_burst(3, interval_s=0.01, num_prompt=16, max_tokens=8, clients=("a", "b"))
    run = begin(machine, make_policy(policy, settings), requests)
    run.environment.run(until_s=10.0)  # a hundred times the time to compute everything once
    assert not run.loop.has_unfinished


# -- negative controls -----------------------------------------------------------------------------------------------


CONTROLS = Controls()
CONTROLS.add("takes_blocks_twice", _Turn, "_has_room", lambda _, self, num_blocks: self._num_seats > 0, "paced")
CONTROLS.add(
    "forgets_that_slots_are_spent",
    SwapBudget,
    "_choose_tier",
    lambda _, self, row, num_copied: self._view.tiers[0].tier,
    "cfs",
)


@CONTROLS.patches("fair")
def never_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Turn, "_make_room", lambda *args: False)
    monkeypatch.setattr(_Turn, "_can_leave", lambda *args: False)


@pytest.mark.parametrize(("fault", "policy"), CONTROLS)
def test_stories_notice_a_policy_that(fault: Fault, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        for seed in range(200):
            Teller(make_story(seed, policy, max_requests=16)).tell()


# -- more and longer stories -------------------------------------------------------------------------------------------


NUM_STORIES = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 50


@pytest.mark.slow
@pytest.mark.parametrize("policy", SHARING)
def test_every_long_story_ends_well(policy: str) -> None:
    @settings(max_examples=NUM_STORIES)
    @given(seed=SEEDS)
    def law(seed: int) -> None:
        Teller(make_story(seed, policy)).tell()

    law()


def counts_on_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Turn, "_has_shared", property(lambda self: False, lambda self, value: None), raising=False)


def preempts_all_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(self: SharingPolicy, view: View, now: float) -> Ranking:
        rows = sorted(live_rows(view), key=lambda row: -row.entered_step)
        return Ranking(rows[::-1] if view.step % 2 else rows, frozenset(), 1)

    monkeypatch.setattr(FairPolicy, "rank", rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "policy", "seed"),
    [
        (counts_on_what_leaves, "cfs", 1290),
        (preempts_all_requests_at_once, "fair", 86),
    ],
)
def test_long_stories_notice_a_policy_that(
    mutate: Callable[[pytest.MonkeyPatch], None], policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        for number in range(seed, seed + 200):
            Teller(make_story(number, policy)).tell()
