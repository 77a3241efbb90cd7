"""The step driver settles copies, learns from them, and counts each stall once."""

from __future__ import annotations

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.plan import StepPlan, Wait
from floodplain.core.request import FinishReason
from floodplain.core.tiers import CopyTime, Direction, Tier
from floodplain.runtime.driver import StepDriver
from tests.support.driver import Choice, ScriptedPolicy
from tests.support.loops import FakeExecutor, make_loop, make_request
from tests.support.swap_choices import FIRST, back_up, idle, swap_out


class Bench:
    """A driver whose only request has been prefilled at 1 s; then the policy follows ``script``."""

    def __init__(self, *script: Choice) -> None:
        policy = ScriptedPolicy()
        self.driver = StepDriver(make_loop(policy=policy, num_slots=16))
        self.executor = FakeExecutor(block_tokens=4)
        self.driver.loop.submit(make_request("r", tuple(range(10)), max_tokens=9, ignore_eos=True))
        self.step(1.0)
        policy.script.extend(script)

    def step(self, now: float) -> StepPlan:
        plan = self.driver.next_plan(now)
        assert isinstance(plan, StepPlan)
        self.driver.complete(self.executor.execute(plan), now)
        return plan

    def settle(self, now: float, *times: CopyTime) -> None:
        self.driver.settle(self.executor.wait(0.0), lambda: times, now)


def test_a_stall_lasts_from_the_first_wait_until_something_runs() -> None:
    bench = Bench(swap_out(FIRST), idle, idle)
    bench.step(2.0)
    for now in (3.0, 5.0):
        assert bench.driver.next_plan(now) == Wait()
        bench.driver.note_wait(now)
    bench.driver.end_wait(7.0)
    bench.driver.end_wait(9.0)
    assert bench.driver.stall_s == 4.0


def test_a_stall_ends_with_the_last_copy() -> None:
    bench = Bench(swap_out(FIRST), idle)
    bench.step(2.0)
    bench.driver.note_wait(2.0)
    assert bench.driver.num_copying == 1
    bench.settle(5.0)
    assert bench.driver.num_copying == 0
    bench.driver.note_wait(5.0)
    bench.driver.end_wait(9.0)
    assert bench.driver.stall_s == 3.0


def test_a_wait_for_copies_that_outlive_their_request_is_no_stall() -> None:
    bench = Bench(back_up(FIRST))
    bench.step(2.0)
    bench.driver.loop.finish(FIRST, FinishReason.ABORT, 3.0)
    bench.driver.note_wait(3.0)
    bench.driver.end_wait(9.0)
    assert bench.driver.num_copying == 1
    assert bench.driver.stall_s == 0.0


def test_links_learn_when_a_copy_has_ended_and_only_then() -> None:
    bench = Bench(back_up(FIRST))
    bench.step(2.0)
    learned: list[CopyTime] = []
    bench.driver.loop.state.links.learn = learned.append  # type: ignore[method-assign]
    bench.driver.settle([], lambda: pytest.fail("no copy has ended"), 3.0)
    copied = CopyTime(Tier.HOST, Direction.OUTBOUND, 1, 2, 1.0)
    bench.settle(4.0, copied)
    assert learned == [copied]


def test_a_copy_is_settled_once() -> None:
    bench = Bench(back_up(FIRST))
    bench.step(2.0)
    [ended] = bench.executor.wait(0.0)
    bench.driver.settle([ended], tuple, 3.0)
    with pytest.raises(InvariantError, match="not in flight"):
        bench.driver.settle([ended], tuple, 4.0)
