"""The engine's shell while nothing can run: it waits for copies or news, and never spins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from floodplain.core.plan import BackupOrder, Decision, Preemption, PreemptionMode, Reason
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import MAX_WAIT_S, Engine
from floodplain.model.tokenizer import ByteTokenizer
from tests.support.driver import ScriptedPolicy
from tests.support.loops import FakeExecutor, make_loop, make_request

FIRST = SeqId(0)


class Clock:
    """Advances by a microsecond whenever it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class SlowExecutor(FakeExecutor):
    """Copies end in the ``num_turns``-th wait; each wait lasts until its timeout."""

    def __init__(self, clock: Clock, num_turns: int) -> None:
        super().__init__(block_tokens=4)
        self.waits_s: list[float] = []
        self._clock = clock
        self._num_turns = num_turns

    def wait_transfers(self, timeout_s: float) -> list[tuple[int, bool]]:
        self.waits_s.append(timeout_s)
        self._clock.now += timeout_s
        return super().wait_transfers(timeout_s) if len(self.waits_s) >= self._num_turns else []


def idle(view: View) -> Decision:
    return Decision()


def swap_out(view: View) -> Decision:
    return Decision(preemptions=(Preemption(FIRST, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST),))


def back_up(view: View) -> Decision:
    return Decision(backups=(BackupOrder(FIRST, 9, Tier.HOST),))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_engine(clock: Clock, num_turns: int, *script: Callable[[View], Decision]) -> tuple[Engine, SlowExecutor]:
    """An engine whose only request has been prefilled; then the policy follows ``script``."""
    policy = ScriptedPolicy()
    executor = SlowExecutor(clock, num_turns)
    engine = Engine(
        make_loop(policy=policy, num_blocks=8, num_slots=8),
        executor,
        ByteTokenizer(256),
        model_name="fake",
        config=EngineConfig(model="fake"),
        block_bytes=1,
        vocab_size=256,
        clock=clock,
    )
    engine.add(make_request("r", tuple(range(10)), max_tokens=20, ignore_eos=True))
    engine.step()
    policy.script.extend(script)
    return engine, executor


def test_a_step_with_nothing_but_a_copy_under_way_waits_for_it(clock: Clock) -> None:
    engine, executor = make_engine(clock, 4, swap_out, idle)
    begin = clock.now
    assert engine.step() == []  # a plan with only a transfer does not wait
    assert executor.waits_s == []
    assert engine.step() == []
    assert len(executor.waits_s) == 4
    seq = engine.loop.state.sequences[FIRST]
    assert seq.num_leaving == 0 and seq.tail is not None and seq.tail[0].is_whole
    assert sum(executor.waits_s) <= engine.swap_stall_s <= clock.now - begin
    assert engine.stats().swap_stall_s == engine.swap_stall_s
    assert engine.stats().kv_bytes == {"local": 8, "host": 3}  # ten tokens lie in three blocks


def test_a_wait_for_copies_ends_after_a_while_and_goes_on_in_the_next_step(clock: Clock) -> None:
    engine, executor = make_engine(clock, 10**6, swap_out, *[idle] * 3)
    engine.step()
    times = []
    for _ in range(3):
        times.append(clock.now)
        assert engine.step() == []
    times.append(clock.now)
    assert all(0.9 * MAX_WAIT_S < b - a < 1.1 * MAX_WAIT_S for a, b in pairwise(times))
    assert engine.swap_stall_s == pytest.approx(3 * MAX_WAIT_S, rel=0.1)
    assert len(executor.waits_s) < 100  # nothing spins beside the copy threads


def test_news_end_a_wait_for_copies(clock: Clock) -> None:
    engine, executor = make_engine(clock, 10**6, swap_out, idle)
    engine.step()
    engine.has_news = lambda: len(executor.waits_s) == 3
    assert engine.step() == []
    assert len(executor.waits_s) == 3
    assert sum(executor.waits_s) < MAX_WAIT_S


def test_copies_that_outlive_their_request_are_waited_for_but_are_no_stall(clock: Clock) -> None:
    engine, executor = make_engine(clock, 3, back_up)
    engine.step()
    engine.finish(FIRST, FinishReason.ABORT)
    assert engine.has_unfinished
    assert engine.step() == []
    assert len(executor.waits_s) == 3
    assert not engine.has_unfinished
    assert engine.swap_stall_s == 0.0
    assert engine.step() == []  # with nothing at all to wait for, it returns at once
    assert len(executor.waits_s) == 3


def test_copies_beside_compute_cost_no_wait(clock: Clock) -> None:
    engine, executor = make_engine(clock, 10**6, back_up)
    engine.step()
    assert engine.loop.state.sequences[FIRST].status is Status.RUNNING
    for _ in range(5):
        assert len(engine.step()) == 1
    assert executor.waits_s == []


def test_copies_that_have_ended_are_taken_whatever_news_there_is(clock: Clock) -> None:
    """In a burst there is always news, and ended copies must not wait for its end."""
    engine, executor = make_engine(clock, 10**6, swap_out, idle)
    engine.step()
    engine.has_news = lambda: True
    executor.poll_transfers = lambda: FakeExecutor.wait_transfers(executor, 0.0)  # type: ignore[method-assign]
    assert engine.step() == []
    assert executor.waits_s == []
    assert engine.loop.state.sequences[FIRST].num_leaving == 0
