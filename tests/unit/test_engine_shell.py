"""The engine's shell: it waits for copies or news while nothing can run, reports its runs, and may overlap steps."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

from floodplain.bench.offline import hardware_report, report_between
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import (
    BackupOrder,
    Decision,
    Preemption,
    PreemptionMode,
    Reason,
    StepPlan,
    StepResult,
    TableUpdate,
)
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from floodplain.engine.batches import SequenceSlots
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.engine.shell import MAX_WAIT_S, Engine
from floodplain.memory.swap_space import SwapStats
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.observe.result import SwapReport, TierTraffic
from tests.support.driver import ScriptedPolicy
from tests.support.loops import FakeExecutor, make_loop, make_request, reference_output

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

    def wait(self, timeout_s: float) -> list[tuple[int, Collection[int]]]:
        self.waits_s.append(timeout_s)
        self._clock.now += timeout_s
        return super().wait(timeout_s) if len(self.waits_s) >= self._num_turns else []

    def stats(self) -> SwapStats:
        return SwapStats()


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
        make_loop(policy=policy, num_blocks=8, num_slots=8, block_bytes=1),
        executor,
        ByteTokenizer(256),
        config=EngineConfig(model="fake"),
        vocab_size=256,
        swap=cast(Any, executor),
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
    executor.poll = lambda: FakeExecutor.wait(executor, 0.0)  # type: ignore[method-assign]
    assert engine.step() == []
    assert executor.waits_s == []
    assert engine.loop.state.sequences[FIRST].num_leaving == 0


# -- reports of a run --------------------------------------------------------------------------------------------------


BEFORE = EngineStats(
    preemptions={"swap": 1},
    swap_bytes={("out", "host"): 10, ("in", "host"): 4, ("out", "peer"): 1, ("in", "peer"): 1},
    backup_bytes=3,
    swap_stall_s=0.5,
    failed_transfers={"not_copied": 1, "digest_mismatch": 0},
)
AFTER = replace(
    BEFORE,
    preemptions={"swap": 4},
    swap_bytes={("out", "host"): 60, ("in", "host"): 24, ("out", "peer"): 3, ("in", "peer"): 1},
    backup_bytes=23,
    swap_stall_s=0.75,
    failed_transfers={"not_copied": 1, "digest_mismatch": 2},
)


def test_a_swap_report_is_the_difference_of_two_snapshots() -> None:
    report = report_between(BEFORE, AFTER)
    assert report.preemptions == 3
    assert report.swap == SwapReport(
        out_bytes=32,
        in_bytes=20,
        backup_bytes=20,
        stall_s=0.25,
        by_tier={"host": TierTraffic(50, 20), "peer": TierTraffic(2, 0)},
        failed_transfers={"not_copied": 0, "digest_mismatch": 2},
    )
    traffic = report.swap.by_tier.values()
    assert report.swap.out_bytes + report.swap.backup_bytes == sum(tier.out_bytes for tier in traffic)


def test_without_swap_space_the_report_names_every_tier_all_the_same() -> None:
    by_tier = {"peer": TierTraffic(0, 0), "host": TierTraffic(0, 0)}
    assert report_between(EngineStats(), EngineStats()).swap == SwapReport(by_tier=by_tier)


def test_hardware_is_emulated_if_a_link_is() -> None:
    real = {"tier": "host", "name": "measured", "emulated": False, "bandwidth": 3e9}
    emulated = {"tier": "host", "name": "emulated-pcie4", "emulated": True, "bandwidth": 1e8, "slowdown": 250.0}
    plain, with_real, with_emulated = (hardware_report("cpu", links) for links in ((), (real,), (emulated,)))
    assert (plain.emulated, with_real.emulated, with_emulated.emulated) == (False, False, True)
    assert plain.name == with_real.name
    assert with_emulated.name == f"emulated-pcie4 on {plain.name}"
    assert with_emulated.links == (emulated,)


# -- the engine's shell with several outstanding steps -----------------------------------------------------------------


MAX_MODEL_LEN = 64


class LateExecutor(FakeExecutor):
    """Runs a plan only when its result is collected."""

    def __init__(self) -> None:
        super().__init__(block_tokens=4)
        self.most_outstanding = 0
        self._submitted: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        mine = set(plan.decodes)
        assert not any(mine & set(members(other)) for other in self._submitted), "a stream is in two steps"
        self._submitted.append(plan)
        self.most_outstanding = max(self.most_outstanding, len(self._submitted))

    def collect(self) -> StepResult:
        return self.execute(self._submitted.popleft())


def members(plan: StepPlan) -> tuple[SeqId, ...]:
    return plan.decodes + tuple(chunk.seq_id for chunk in plan.prefills)


def serve(depth: int, requests: list[Request], num_blocks: int) -> tuple[dict[SeqId, list[int]], LateExecutor]:
    """Serve all requests. Returns the tokens of each, and the executor."""
    executor = LateExecutor()
    loop = make_loop(num_blocks=num_blocks, depth=depth, max_model_len=MAX_MODEL_LEN)
    engine = Engine(
        loop,
        executor,
        ByteTokenizer(256),
        config=EngineConfig(model="fake"),
        vocab_size=256,
    )
    outputs: dict[SeqId, list[int]] = {engine.add(request): [] for request in requests}
    while engine.has_unfinished:
        for seq_id, delta in engine.step():
            outputs[seq_id] += delta.token_ids
        loop.check_integrity()
    assert len(engine.take_finished()) == len(requests)
    return outputs, executor


@pytest.mark.parametrize("num_blocks", [80, 17])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_tokens_are_the_same_however_many_steps_are_outstanding(depth: int, num_blocks: int) -> None:
    requests = [make_request(f"r{n}", tuple(range(n, n + 5)), float(n), max_tokens=20) for n in range(9)]
    outputs, executor = serve(depth, requests, num_blocks)
    assert executor.most_outstanding == depth
    assert list(outputs.values()) == [reference_output(request, MAX_MODEL_LEN) for request in requests]


def test_a_request_alone_is_in_one_step_at_a_time() -> None:
    _, executor = serve(4, [make_request("r", tuple(range(5)), max_tokens=20)], num_blocks=16)
    assert executor.most_outstanding == 1


# -- rows of sequences -------------------------------------------------------------------------------------------------


def table(number: int) -> TableUpdate:
    return TableUpdate(SeqId(number), 0, (BlockId(number), BlockId(number + 1)))


def test_every_sequence_keeps_its_table_however_many_come() -> None:
    slots = SequenceSlots(max_blocks=4, num_rows=2)
    for number in range(9):
        slots.update_table(table(number))
    rows = slots.rows([SeqId(number) for number in range(9)])
    assert len(set(rows.tolist())) == 9
    assert slots.tables[rows, :2].tolist() == [[number, number + 1] for number in range(9)]


def test_a_row_is_given_again_when_its_sequence_is_gone() -> None:
    slots = SequenceSlots(max_blocks=4, num_rows=2)
    for number in range(50):
        slots.update_table(table(number))
        slots.release(SeqId(number))
    assert len(slots.tables) == 2


# -- a thread that hands an engine to another thread releases its compute threads --------------------------------------


COUNT = """
import os, torch
from floodplain.engine.compute_threads import release_compute_threads
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
idle = count()
def compute():
    torch.ones(3000, 3000).add_(1)
compute()
busy = count()
can = release_compute_threads()
released = count()
compute()
print(can, busy - idle, released - idle, count() - idle)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_workers_go_and_come_back_when_they_are_needed() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    can, *counts = done.stdout.split()
    if can == "False":
        pytest.skip("this OpenMP cannot let its threads go")
    assert counts == ["2", "0", "2"]
