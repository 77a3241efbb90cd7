"""Measured steps fit the engine, cover its sizes, and determine all parts of a step's time."""

from __future__ import annotations

from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.core.plan import StepPlan, StepResult
from floodplain.cost.fit import StepRow, fit_steps
from floodplain.cost.step_time import PARTS, StepCost, StepTimer, StepWork
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.profiler.step_profile import StepLimits, StepRecorder, StepShape, draw_shapes, limits_of, record_rows
from tests.support.bursts import Machine
from tests.support.examples import examples

CPU = StepLimits(max_num_seqs=256, max_batched_tokens=2048, max_model_len=2048, num_blocks=4000, block_tokens=16)
COST = StepCost(
    base_s=0.01, decode_s=0.002, context_token_s=1e-5, chunk_s=0.001, prefill_token_s=1e-4, self_pair_s=1e-7,
    prefix_token_s=2e-5, prefix_pair_s=2e-7,
)  # fmt: skip

limits = st.builds(
    StepLimits,
    max_num_seqs=st.integers(1, 300),
    max_batched_tokens=st.integers(8, 3000),
    max_model_len=st.integers(8, 5000),
    num_blocks=st.integers(8, 3000),
    block_tokens=st.sampled_from([1, 4, 16]),
)


@given(limits=limits, num_shapes=st.integers(1, 40), seed=st.integers(0, 999))
@settings(max_examples=examples(150), deadline=None)
def test_every_step_fits_the_engine(limits: StepLimits, num_shapes: int, seed: int) -> None:
    shapes = draw_shapes(limits, num_shapes, Random(seed))
    assert len(shapes) == num_shapes
    for shape in shapes:
        assert limits.fits(shape)
        assert shape.num_tokens > 0
        assert all(context >= 2 for context in shape.contexts)
        assert all(tokens >= 2 and before >= 0 for before, tokens in shape.chunks)


@given(seed=st.integers(0, 999))
@settings(max_examples=examples(10), deadline=None)
def test_drawn_steps_are_of_all_kinds_and_sizes(seed: int) -> None:
    shapes = draw_shapes(CPU, 64, Random(seed))
    kinds = [(bool(shape.contexts), min(2, len(shape.chunks))) for shape in shapes]
    assert [kinds.count(kind) for kind in ((True, 0), (False, 1), (False, 2), (True, 1))] == [16] * 4
    tokens = [shape.chunks[0][1] for shape in shapes if len(shape.chunks) == 1]
    assert min(tokens) <= 4
    assert max(tokens) > 1000
    assert max(len(shape.contexts) for shape in shapes) > 100
    begun = sum(before > 0 for shape in shapes for before, _ in shape.chunks)
    assert 0.25 < begun / sum(len(shape.chunks) for shape in shapes) < 0.75


def test_an_engine_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(UserError, match="room for less than 8 tokens"):
        StepLimits(max_num_seqs=4, max_batched_tokens=2048, max_model_len=2048, num_blocks=1, block_tokens=4)


# -- the recorder, on an executor that takes the time of a cost ------------------------------------------------------


class PricedExecutor:
    """An executor whose steps take the time of a cost, by its own clock; if ``stalls``, every fifth step stalls."""

    def __init__(self, stalls: bool = False) -> None:
        self.now = 0.0
        self.works: list[StepWork] = []
        self._timer, self._reader = StepTimer(COST), StepTimer(COST)
        self._stalls = stalls
        self._steps = count()

    def clock(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> None:
        self.works.append(StepWork.of(*self._reader.read(plan)))
        is_stalled = self._stalls and not next(self._steps) % 5
        self.now += self._timer.time_s(plan) * (10 if is_stalled else 1)
        tables = [block for table in plan.tables for block in table.blocks]
        assert len(set(tables)) == len(tables)

    def collect(self) -> StepResult:
        return StepResult(0, ())


def open_recorder(executor: PricedExecutor) -> tuple[StepRecorder, StepLimits]:
    machine = Machine(num_blocks=2000, block_tokens=16, max_num_seqs=64, max_batched_tokens=512, max_model_len=1000)
    engine = cast(Any, SimpleNamespace(executor=executor, loop=machine.make_loop(FcfsPolicy())))
    return StepRecorder(engine, Random(1), executor.clock), limits_of(engine)


@given(seed=st.integers(0, 999))
@settings(max_examples=examples(10), deadline=None)
def test_a_step_is_measured_as_the_loop_would_run_it(seed: int) -> None:
    executor = PricedExecutor()
    recorder, limits = open_recorder(executor)
    for shape in draw_shapes(limits, 12, Random(seed)):
        assert recorder.measure(shape) == pytest.approx(COST.time_s(shape.work))
        assert executor.works[-1] == shape.work


@pytest.mark.parametrize("stalls", [False, True])
def test_the_cost_is_found_though_steps_stall(stalls: bool) -> None:
    executor = PricedExecutor(stalls)
    recorder, limits = open_recorder(executor)
    rng = Random(3)
    steps = record_rows(
        recorder, draw_shapes(limits, 64, rng), num_repeats=5, limit_s=1e9, rng=rng, clock=executor.clock
    )
    assert [step.num_times for step in steps] == [5] * 64
    fit = fit_steps([StepRow(step.shape.work, step.seconds) for step in steps])
    assert [getattr(fit.cost, name) for name in PARTS] == pytest.approx(
        [getattr(COST, name) for name in PARTS], rel=1e-4
    )


def test_measuring_ends_when_its_time_is_over() -> None:
    executor, seen = PricedExecutor(), []
    recorder, _ = open_recorder(executor)
    shape = StepShape((10,), ())
    step_s = COST.time_s(shape.work)
    steps = record_rows(
        recorder,
        [shape] * 100,
        num_repeats=5,
        limit_s=20 * step_s,
        rng=Random(0),
        on_step=lambda: seen.append(executor.now),
        clock=executor.clock,
    )
    assert len(seen) == sum(step.num_times for step in steps)
    assert 20 * step_s < executor.now < 23 * step_s
