"""If swap space is slower than recomputing, no request takes turns; in virtual time.

A block of four tokens is computed in 1.2 ms.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.plan import Decision, Reason
from floodplain.core.tiers import Link, Tier
from floodplain.core.view import View
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from floodplain.runtime.links import FORGET_STEPS
from tests.support.bursts import BLOCK_BYTES, Machine, Recorder, Run, begin, burst, make_burst

QUICK_S, SLOW_S = 0.0001, 0.005
REQUESTS = make_burst(40, interval_s=0.02, num_prompt=8, max_tokens=24)
# Without cached prefixes: copying those to swap space would keep blocks busy that FCFS without swap space could use.
SLOW = Machine(block_s=SLOW_S, caches_prefixes=False)
SHARING = ["cfs", "fair", "paced", "timely"]


def token_times(run: Run) -> list[list[float]]:
    return [list(one.token_times_s) for one in run.lifecycles.values()]


@pytest.mark.parametrize("name", ["cfs", "fair", "paced"])
def test_over_a_slow_link_there_are_no_turns_and_runs_equal_fcfs(name: str) -> None:
    policy = make_policy(name, SharingSettings(slice_steps=4))
    run, fcfs = burst(SLOW, policy, REQUESTS), burst(replace(SLOW, num_slots=0), make_policy("fcfs"), REQUESTS)
    assert token_times(run) == token_times(fcfs)
    assert run.counters.preemptions["swap"] == 0
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] > 100


def test_over_a_slow_link_timely_chooses_admissions_without_turns() -> None:
    recorder = Recorder(make_policy("timely", SharingSettings(slice_steps=4)))
    run = burst(SLOW, recorder, REQUESTS)
    assert turns([(view, decision) for view, _, decision in recorder.seen]) == 0
    assert run.counters.preemptions["swap"] == 0
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] > 100


@pytest.mark.parametrize("name", SHARING)
def test_over_a_quick_link_there_are_turns(name: str) -> None:
    run = burst(replace(SLOW, block_s=QUICK_S), make_policy(name, SharingSettings(slice_steps=4)), REQUESTS)
    assert run.counters.preemptions["swap"] > 20
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] == 0


def become(run: Run, block_s: float) -> None:
    run.links[Tier.HOST] = Link(Tier.HOST, BLOCK_BYTES / block_s)


def turns(seen: list[tuple[View, Decision]]) -> int:
    """Return how often a request was preempted for another one's turn."""
    orders = [order for _, decision in seen for order in decision.preemptions]
    return [order.reason for order in orders].count(Reason.SLICE_ENDED)


@pytest.mark.parametrize("name", SHARING)
def test_a_link_that_becomes_slow_ends_turns_and_all_requests_resume(name: str) -> None:
    """The policy measures copies. Those in flight at the change are slow too; no request is preempted then."""
    recorder = Recorder(make_policy(name, SharingSettings(slice_steps=4)))
    run = begin(Machine(block_s=QUICK_S, caches_prefixes=False), recorder, REQUESTS)
    slow_from_s = 0.6
    run.environment.schedule(slow_from_s, lambda: become(run, SLOW_S))
    run.environment.run()
    assert not run.loop.has_unfinished
    before, after = ([(v, d) for v, now, d in recorder.seen if (now > slow_from_s) is late] for late in (False, True))
    assert after[0][0].swapped  # some are swapped out
    told = next(index for index, (_, decision) in enumerate(after) if decision.reason is Reason.SWAP_SLOW)
    assert told < 30
    assert turns(before) > turns(after[:told])
    assert turns(after[told:]) < 5
    assert [decision.reason for view, decision in after if view.swapped].count(Reason.SWAP_SLOW) > 5


@pytest.mark.parametrize("name", SHARING)
def test_a_link_that_is_quick_again_is_tried_again(name: str) -> None:
    """Without turns nothing is copied and no price is measured, so old prices are discarded after some steps."""
    recorder = Recorder(make_policy(name, SharingSettings(slice_steps=4)))
    requests = make_burst(400, interval_s=0.045, num_prompt=8, max_tokens=24)
    run = begin(Machine(block_s=QUICK_S, caches_prefixes=False), recorder, requests)
    slow_from_s, quick_from_s = 0.6, 2.0
    run.environment.schedule(slow_from_s, lambda: become(run, SLOW_S))
    run.environment.schedule(quick_from_s, lambda: become(run, QUICK_S))
    run.environment.run()
    first_step = next(view.step for view, now, _ in recorder.seen if now > quick_from_s)
    after = [(view, decision) for view, now, decision in recorder.seen if now > quick_from_s]
    told = [(v, d) for v, d in after if v.step < first_step + FORGET_STEPS // 2]
    assert not turns(told)
    assert turns(after) > 10
