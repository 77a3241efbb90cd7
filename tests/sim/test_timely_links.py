"""``timely`` over links of every speed, in virtual time: expensive copies are avoided, and cost no throughput."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from floodplain.policy import gate
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from tests.support.bursts import Machine, Run, burst, make_burst
from tests.support.examples import examples
from tests.support.overload import CAPACITY, MACHINE, MAX_TOKENS, NUM_PROMPT

TTFT_S, TPOT_S, NUM_REQUESTS = 0.3, 0.04, 200
COMPUTE_S = MACHINE.block_tokens * MACHINE.line.prefill_token_s
"""Seconds to compute the tokens of a block."""
LATE = replace(MACHINE, latency_s=6 * COMPUTE_S)
"""A copy of one block takes six times as long as computing it, and a copy of many hardly longer."""


def play(machine: Machine, name: str = "timely") -> Run:
    policy = make_policy(name, settings_for(name, ttft_goal_s=TTFT_S, tpot_goal_s=TPOT_S, max_gap_s=1.0))
    interval_s = 1 / (1.5 * CAPACITY)
    requests = make_burst(NUM_REQUESTS, interval_s=interval_s, num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)
    return burst(machine, policy, requests)


@cache
def fcfs() -> Run:
    return play(MACHINE, "fcfs")


def attained(run: Run) -> float:
    both = [(one.ttft_s or 0.0) <= TTFT_S and (one.tpot_s or 0.0) <= TPOT_S for one in run.lifecycles.values()]
    return sum(both) / len(both)


@pytest.mark.slow
@settings(max_examples=examples(4))
@given(block=st.floats(-3.0, 1.5), latency=st.floats(-3.0, 1.5))
@example(block=-2.0, latency=0.8)
@example(block=-0.4, latency=-3.0)
def test_over_any_link_more_attain_their_goals_and_the_device_loses_nothing(block: float, latency: float) -> None:
    """A copy takes 10 ** ``block`` times a block's compute time per block, plus 10 ** ``latency`` times that."""
    run = play(replace(MACHINE, block_s=COMPUTE_S * 10**block, latency_s=COMPUTE_S * 10**latency))
    assert attained(run) > 2.5 * attained(fcfs())
    assert run.elapsed_s <= 1.05 * fcfs().elapsed_s
    assert run.counters.preemptions["swap"] <= 3 * NUM_REQUESTS
    if block > 0 or latency > 1:
        assert run.counters.preemptions["swap"] == 0


@pytest.mark.slow
def test_turns_that_ignore_the_latency_of_copies_attain_less(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = play(LATE)
    monkeypatch.setattr(gate, "copying_pays", lambda view: True)
    free = play(LATE)
    print(f"\n{attained(priced):.0%} attain both goals, {attained(free):.0%} with turns in spite of the price")
    assert attained(free) < 0.5 * attained(priced)
    assert free.elapsed_s > 1.1 * priced.elapsed_s
