"""``timely`` where no request can take turns, in virtual time: it still chooses which requests begin.

``pytest -s`` prints the figures of ``docs/design/004``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest

from floodplain.core.plan import Reason
from floodplain.policy.deadlines import LINE_GRACE_S
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from floodplain.policy.timely import TimelyPolicy
from tests.support.bursts import Machine, Run, burst, make_burst
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
