"""``timely`` where turns cost too much or there are none, in virtual time: it still chooses which requests begin.

``pytest -s`` prints the figures of ``docs/design/004``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from floodplain.core.plan import Reason
from floodplain.policy import gate
from floodplain.policy.deadlines import LINE_GRACE_S
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from floodplain.policy.timely import TimelyPolicy
from tests.support.bursts import Machine, Run, burst, make_burst
from tests.support.examples import examples
from tests.support.overload import CAPACITY, MACHINE, MAX_TOKENS, NUM_PROMPT, longest_step_s

TTFT_S, TPOT_S, PATIENCE = 0.3, 0.04, 1.1
LENGTHS = MAX_TOKENS // 4, MAX_TOKENS * 7 // 4
NO_SWAP = replace(MACHINE, num_slots=0)
SLOW = replace(MACHINE, block_s=0.05)
"""A copy of a block takes ten times as long as computing its tokens."""
SMALL = replace(MACHINE, num_slots=MACHINE.num_blocks * 2 // 5)


@cache
def play(factor: float, machine: Machine, name: str = "timely") -> Run:
    goals = {"ttft_goal_s": TTFT_S, "tpot_goal_s": TPOT_S, "max_gap_s": 1.0, "line_patience": PATIENCE}
    policy = make_policy(name, settings_for(name, **goals))
    rng, rate = Random(1), factor * CAPACITY
    made = make_burst(int(10 * rate), interval_s=1 / rate, num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)
    requests = [replace(one, params=replace(one.params, max_tokens=rng.randint(*LENGTHS))) for one in made]
    return burst(machine, policy, requests)


def attained(run: Run) -> float:
    both = [(one.ttft_s or 0.0) <= TTFT_S and (one.tpot_s or 0.0) <= TPOT_S for one in run.lifecycles.values()]
    return sum(both) / len(both)


def show(title: str, run: Run) -> None:
    recomputed = run.counters.preemptions["recompute"]
    print(f"\n{title}: {attained(run):.0%} attain both goals, {recomputed} recompute, wait {run.max_ttft_s:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("machine", [NO_SWAP, SLOW, SMALL])
@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_more_requests_attain_both_goals_than_under_fcfs(factor: float, machine: Machine) -> None:
    run, fcfs = play(factor, machine), play(factor, NO_SWAP, "fcfs")
    show(f"timely, {machine.num_slots} slots, {factor}x", run)
    show(f"fcfs, {factor}x", fcfs)
    assert attained(run) > 2.5 * attained(fcfs)
    assert run.elapsed_s <= fcfs.elapsed_s
    assert run.counters.preemptions["recompute"] < 0.1 * fcfs.counters.preemptions["recompute"]
    reason = Reason.SWAP_SLOW if machine is SLOW else Reason.NO_SWAP
    assert run.counters.limited_steps[reason.value] > 0


@pytest.mark.slow
@pytest.mark.parametrize("machine", [NO_SWAP, SMALL])
@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_a_wait_is_at_most_that_of_the_line_and_a_longest_answer(factor: float, machine: Machine) -> None:
    """No stream is preempted for the head of the line."""
    run, fcfs = play(factor, machine), play(factor, NO_SWAP, "fcfs")
    answer_s = LENGTHS[1] * longest_step_s(run)
    assert run.max_ttft_s <= PATIENCE * fcfs.max_ttft_s + LINE_GRACE_S + answer_s


@pytest.mark.slow
@pytest.mark.parametrize("slots_per_block", [0.4, 0.8])
def test_turns_pay_only_with_the_least_slots_or_more(slots_per_block: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(MACHINE, num_slots=int(MACHINE.num_blocks * slots_per_block))
    found = []
    for least_slots in (inf, 0.0):
        monkeypatch.setattr(TimelyPolicy, "least_slots", least_slots)
        found.append(play.__wrapped__(1.2, machine))
    without, turning = found
    show(f"without turns, {machine.num_slots} slots", without)
    show(f"with turns, {machine.num_slots} slots", turning)
    if slots_per_block < 0.75:
        assert attained(turning) < 0.75 * attained(without)
    else:
        assert attained(turning) > attained(without) - 0.02
        assert turning.max_ttft_s < without.max_ttft_s


# -- over links of every speed -----------------------------------------------------------------------------------------


NUM_REQUESTS = 200
COMPUTE_S = MACHINE.block_tokens * MACHINE.line.prefill_token_s
"""Seconds to compute the tokens of a block."""
LATE = replace(MACHINE, latency_s=6 * COMPUTE_S)
"""A copy of one block takes six times as long as computing it, and a copy of many hardly longer."""


def play_over(machine: Machine, name: str = "timely") -> Run:
    policy = make_policy(name, settings_for(name, ttft_goal_s=TTFT_S, tpot_goal_s=TPOT_S, max_gap_s=1.0))
    interval_s = 1 / (1.5 * CAPACITY)
    requests = make_burst(NUM_REQUESTS, interval_s=interval_s, num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)
    return burst(machine, policy, requests)


@cache
def fcfs() -> Run:
    return play_over(MACHINE, "fcfs")


@pytest.mark.slow
@settings(max_examples=examples(4))
@given(block=st.floats(-3.0, 1.5), latency=st.floats(-3.0, 1.5))
@example(block=-2.0, latency=0.8)
@example(block=-0.4, latency=-3.0)
def test_over_any_link_more_attain_their_goals_and_the_device_loses_nothing(block: float, latency: float) -> None:
    """A copy takes 10 ** ``block`` times a block's compute time per block, plus 10 ** ``latency`` times that."""
    run = play_over(replace(MACHINE, block_s=COMPUTE_S * 10**block, latency_s=COMPUTE_S * 10**latency))
    assert attained(run) > 2.5 * attained(fcfs())
    assert run.elapsed_s <= 1.05 * fcfs().elapsed_s
    assert run.counters.preemptions["swap"] <= 3 * NUM_REQUESTS
    if block > 0 or latency > 1:
        assert run.counters.preemptions["swap"] == 0


@pytest.mark.slow
def test_turns_that_ignore_the_latency_of_copies_attain_less(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = play_over(LATE)
    monkeypatch.setattr(gate, "copying_pays", lambda view: True)
    free = play_over(LATE)
    print(f"\n{attained(priced):.0%} attain both goals, {attained(free):.0%} with turns in spite of the price")
    assert attained(free) < 0.5 * attained(priced)
    assert free.elapsed_s > 1.1 * priced.elapsed_s
