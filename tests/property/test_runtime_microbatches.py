"""FCFS with 2 to 4 outstanding steps: no stream is in two of them, and every story ends, by every rule.

The loop's integrity is checked after every call, and every output against a reference without an engine: the same
tokens as at depth 1. The control ignores outstanding steps, and preempts a sequence of one.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.plan import Decision, StepPlan, Wait
from floodplain.core.view import View
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from tests.support.bursts import Recorder
from tests.support.driver import Driver
from tests.support.examples import examples
from tests.support.loops import make_loop, make_request
from tests.support.turns import Story, Teller, make_story


def dear(prefix: int, num_tokens: int) -> float:
    """A price at which attention costs as much as the rest after four tokens."""
    return num_tokens + num_tokens * (prefix + num_tokens / 2) / 4


RULES = [
    MicrobatchRule(),
    MicrobatchRule("tokens", least_tokens=3),
    MicrobatchRule("even", dear, least_tokens=3),
    MicrobatchRule("even", dear, least_tokens=16),
    MicrobatchRule("halving", dear, least_tokens=4),
]


class CheckedFcfs(FcfsPolicy):
    """FCFS; counts decisions beside outstanding steps, and checks that no stream is in one of those: its next token is
    unknown. Chunks of one prompt may be in consecutive steps.
    """

    def __init__(self, rule: MicrobatchRule | None = None) -> None:
        super().__init__(saves_prefixes=True, microbatches=rule)
        self.num_overlaps = self.num_followers = 0

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        decision = super().decide(view, now, rng)
        followers = {chunk.seq_id for chunk in decision.chunks} & view.outstanding
        assert not {*decision.decodes, *(chunk.seq_id for chunk in decision.admissions)} & view.outstanding
        assert not followers & {row.seq_id for row in view.running if row.is_decoding}
        is_working = bool(decision.decodes or decision.chunks or decision.admissions)
        self.num_overlaps += bool(is_working and view.outstanding)
        self.num_followers += len(followers)
        return decision


class Blind(FcfsPolicy):
    """Ignores which sequences are in outstanding steps."""

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        return super().decide(replace(view, outstanding=frozenset()), now, rng)


def make_deep_story(seed: int, depth: int) -> Story:
    story = make_story(seed, "fcfs", max_requests=12)
    return replace(story, machine=replace(story.machine, depth=depth))


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([2, 3, 4]), rule=st.sampled_from(RULES))
def test_every_story_ends_with_the_tokens_of_an_undisturbed_run(seed: int, depth: int, rule: MicrobatchRule) -> None:
    Teller(make_deep_story(seed, depth), CheckedFcfs(rule)).tell()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_steps_overlap_and_requests_are_preempted(depth: int) -> None:
    num_overlaps = num_preemptions = num_followers = 0
    for seed in range(10):
        policy = CheckedFcfs(RULES[seed % len(RULES)])
        driver = Teller(make_deep_story(seed, depth), policy).tell()
        num_overlaps += policy.num_overlaps
        num_followers += policy.num_followers
        num_preemptions += driver.loop.counters.preemptions["recompute"]
    assert num_overlaps > 300
    assert num_followers > 20
    assert num_preemptions > 20


@settings(max_examples=examples(20))
@given(num_streams=st.integers(1, 13), depth=st.integers(1, 4), prompt=st.integers(1, 6), budget=st.integers(13, 80))
@example(num_streams=12, depth=2, prompt=3, budget=80)
def test_streams_are_divided_evenly_over_steps(num_streams: int, depth: int, prompt: int, budget: int) -> None:
    """After prefill, no step has more than its share, and each stream is in one of any ``depth`` consecutive steps."""
    loop = make_loop(num_blocks=400, max_model_len=80, max_num_seqs=16, max_batched_tokens=budget, depth=depth)
    driver = Driver(loop)
    for number in range(num_streams):
        driver.submit(range(number, number + prompt), max_tokens=60, ignore_eos=True)
    plans = [plan for _ in range(30) if (plan := next_plan(driver))]
    sizes = [len(plan.decodes) for plan in plans[-2 * depth :]]
    assert max(sizes) <= -(-num_streams // depth)
    assert {seq_id for plan in plans[-depth:] for seq_id in plan.decodes} == set(range(num_streams))


@pytest.mark.parametrize("rule", [MicrobatchRule("even", lambda p, n: 50.0 if n == 1 else n, 8), *RULES[:4]])
def test_streams_do_not_stop_an_older_prompt_nor_it_them(rule: MicrobatchRule) -> None:
    """The law holds where a stream costs as much as 50 tokens of a prompt."""
    policy = FcfsPolicy(microbatches=rule)
    driver = Driver(
        make_loop(policy=policy, num_blocks=400, max_num_seqs=16, max_batched_tokens=64, depth=2, max_model_len=90)
    )
    for number in range(12):
        driver.submit([number], max_tokens=80, ignore_eos=True)
    for _ in range(8):
        next_plan(driver)
    request = make_request("prompt", tuple(range(80)), driver.tick(), max_tokens=2, ignore_eos=True)
    prompt = driver.submit_request(replace(request, priority=-1))
    plans: list[StepPlan] = []
    while not driver.outputs[prompt]:
        plan = next_plan(driver)
        assert plan is not None and len(plans) < 60
        plans.append(plan)
    assert sum(len(plan.decodes) for plan in plans) >= 4 * len(plans)  # six of them in a step, but for rounding
    assert max(len(plan.decodes) for plan in plans[2:]) <= 7


def next_plan(driver: Driver) -> StepPlan | None:
    """Return one more plan; completes the oldest outstanding step if that is necessary."""
    plan = driver.plan()
    if isinstance(plan, Wait) and driver.pending:
        driver.complete()
        plan = driver.plan()
    return plan if isinstance(plan, StepPlan) else None


def test_at_depth_one_a_step_has_all_tokens() -> None:
    policy = Recorder(FcfsPolicy())
    driver = Driver(make_loop(policy=policy, max_batched_tokens=11))
    driver.submit(range(5), max_tokens=4)
    driver.run()
    assert {MicrobatchRule("even").open_budget(view).num_tokens for view, _, _ in policy.seen} == {11}


# -- negative control ------------------------------------------------------------------------------------------------


def test_a_policy_that_does_not_see_outstanding_steps_is_found_out() -> None:
    story = make_deep_story(2, depth=3)
    Teller(story, CheckedFcfs()).tell()
    with pytest.raises(InvariantError, match="is preempted in an outstanding step"):
        Teller(story, Blind()).tell()
