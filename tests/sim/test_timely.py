"""``timely`` under overload, in virtual time: its bounds, and its gains."""

from __future__ import annotations

from functools import cache
from statistics import mean

import pytest

from floodplain.core.plan import Reason
from floodplain.policy.deadlines import LINE_GRACE_S
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from floodplain.policy.timely import STEPS_BESIDE
from tests.sim.test_paced_goals import attainment
from tests.support.bursts import Recorder, Run, burst, make_burst
from tests.support.overload import CAPACITY, MACHINE, MAX_TOKENS, NUM_PROMPT, longest_step_s

TTFT_S, MAX_GAP_S, PATIENCE = 0.3, 1.0, 1.1
TIGHT_S, LOOSE_S = 0.04, 0.1
"""TPOT goals that exclude turns, and that allow them: a token in a full batch takes 0.015 s."""
LOADS = [(1.2, 400), (1.5, 300), (3.0, 300)]


@cache
def play(
    factor: float, num_requests: int, name: str = "timely", patience: float = PATIENCE, tpot_goal_s: float = TIGHT_S
) -> tuple[Run, Recorder]:
    goals = {"ttft_goal_s": TTFT_S, "tpot_goal_s": tpot_goal_s, "max_gap_s": MAX_GAP_S, "line_patience": patience}
    recorder = Recorder(make_policy(name, settings_for(name, **goals)))
    interval_s = 1 / (factor * CAPACITY)
    requests = make_burst(num_requests, interval_s=interval_s, num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)
    return burst(MACHINE, recorder, requests), recorder


def turns_s(run: Run, num_turns: int) -> float:
    return num_turns * (settings_for("timely").slice_steps + STEPS_BESIDE) * longest_step_s(run)


def wait_bound_s(factor: float, num_requests: int) -> float:
    """Return FCFS's longest wait with patience, the grace, and turns of streams that precede a head that is due."""
    run, _ = play(factor, num_requests)
    return PATIENCE * play(factor, num_requests, "fcfs")[0].max_ttft_s + LINE_GRACE_S + turns_s(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), LOADS)
def test_no_request_waits_longer_than_the_law_of_the_line_allows(factor: float, num_requests: int) -> None:
    run, recorder = play(factor, num_requests)
    assert run.max_ttft_s <= wait_bound_s(factor, num_requests)
    reasons = {decision.reason for _, _, decision in recorder.seen}
    assert {Reason.PROMISED, Reason.CROWDED} <= reasons


@pytest.mark.slow
def test_without_the_law_the_head_of_the_line_waits_behind_all_newcomers() -> None:
    """Control: a patience of 1000 disables the law."""
    assert play(1.2, 400, patience=1000.0)[0].max_ttft_s > 1.3 * wait_bound_s(1.2, 400)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), LOADS)
def test_no_stream_is_silent_for_longer_than_the_gap_and_two_turns(factor: float, num_requests: int) -> None:
    run, _ = play(factor, num_requests)
    assert run.max_gap_s <= MAX_GAP_S + turns_s(run, 2)
    assert run.counters.preemptions["recompute"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), LOADS)
def test_the_device_does_as_much_as_under_fcfs(factor: float, num_requests: int) -> None:
    run, fcfs = play(factor, num_requests)[0], play(factor, num_requests, "fcfs")[0]
    assert run.elapsed_s <= 1.05 * fcfs.elapsed_s
    assert run.instance.stall_s <= 0.01 * run.elapsed_s


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "times"), [(3.0, 1.5), (5.0, 1.7)])
def test_more_requests_attain_both_goals_than_under_fcfs(factor: float, times: float) -> None:
    assert attainment(factor, "timely") > times * attainment(factor, "fcfs")


@pytest.mark.slow
def test_under_overload_more_requests_attain_goals_than_under_paced() -> None:
    assert attainment(5.0, "timely") > 1.3 * attainment(5.0, "paced")


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_while_sharing_keeps_all_goals_it_is_as_good_as_paced(factor: float) -> None:
    assert attainment(factor, "timely") >= 0.98


@pytest.mark.slow
def test_where_all_goals_fit_first_tokens_are_as_quick_as_under_paced() -> None:
    runs = {name: play(1.2, 300, name, tpot_goal_s=LOOSE_S)[0] for name in ("timely", "paced", "fcfs")}
    waits_s = {name: mean(one.ttft_s or 0.0 for one in run.lifecycles.values()) for name, run in runs.items()}
    assert waits_s["timely"] <= 1.5 * waits_s["paced"] < 0.1 * waits_s["fcfs"]
