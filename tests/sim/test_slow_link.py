"""What becomes of turns when swap space is slower than computing again, in virtual time.

A block of four tokens is computed in 1.2 ms.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.plan import Preemption, Reason
from floodplain.core.tiers import Link, Tier
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import BLOCK_BYTES, Machine, Recorder, Run, begin, burst, make_burst

QUICK_S, SLOW_S = 0.0001, 0.005
REQUESTS = make_burst(40, interval_s=0.02, num_prompt=8, max_tokens=24)
# Without cached prefixes: copying those to swap space would keep blocks busy that FCFS without swap space could use.
SLOW = Machine(block_s=SLOW_S, caches_prefixes=False)
SHARING = ["cfs", "fair", "paced"]


def token_times(run: Run) -> list[list[float]]:
    return [list(one.token_times_s) for one in run.lifecycles.values()]


@pytest.mark.parametrize("name", SHARING)
def test_over_a_slow_link_nobody_takes_turns_and_all_is_as_under_fcfs(name: str) -> None:
    policy = make_policy(name, SharingSettings(slice_steps=4))
    run, fcfs = burst(SLOW, policy, REQUESTS), burst(replace(SLOW, num_slots=0), make_policy("fcfs"), REQUESTS)
    assert token_times(run) == token_times(fcfs)
    assert run.counters.preemptions["swap"] == 0
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] > 100


@pytest.mark.parametrize("name", SHARING)
def test_over_a_quick_link_they_do(name: str) -> None:
    """The control."""
    run = burst(replace(SLOW, block_s=QUICK_S), make_policy(name, SharingSettings(slice_steps=4)), REQUESTS)
    assert run.counters.preemptions["swap"] > 20
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] == 0


@pytest.mark.parametrize("name", SHARING)
def test_a_link_that_becomes_slow_ends_the_turns_and_everybody_comes_back(name: str) -> None:
    recorder = Recorder(make_policy(name, SharingSettings(slice_steps=4)))
    run = begin(Machine(block_s=QUICK_S, caches_prefixes=False), recorder, REQUESTS)
    slow_from_s = 0.6
    links = run.loop.state.links
    slow = Link(Tier.HOST, BLOCK_BYTES / SLOW_S)
    run.environment.schedule(slow_from_s, lambda: links.update({Tier.HOST: slow}))
    run.environment.run()
    assert not run.loop.has_unfinished
    seen = [(view, decision) for view, now, decision in recorder.seen if now > slow_from_s]
    assert seen[0][0].swapped  # some are out
    turned_out: list[Preemption] = [order for _, decision in seen for order in decision.preemptions]
    assert not [order for order in turned_out if order.reason is Reason.SLICE_ENDED]
    assert [decision.reason for view, decision in seen if view.swapped].count(Reason.SWAP_SLOW) > 5
