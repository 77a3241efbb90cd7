"""Plans of a loop, priced by a schedule of layers: their reads, and requests that run on such a device."""

from __future__ import annotations

import pytest

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.plan import Preemption, PreemptionMode, PrefillChunk, Reason, StepPlan
from floodplain.core.request import SeqId
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import LINE, Machine, Run, begin, make_burst
from tests.support.layer_steps import (
    AheadLayers,
    LayeredSteps,
    LayerLink,
    LayerSchedule,
    LayerShape,
    LayerWork,
    OnDemandLayers,
    PieLayers,
    PlanWork,
)

SHAPE = LayerShape(num_layers=6, block_tokens=4, token_bytes=10)
PLACES = LayerPlaces(6, 4)
A, B = SeqId(0), SeqId(1)


def price(plan: StepPlan, read_bytes: int) -> float:
    return LINE.time_s(plan) + 1e-6 * read_bytes


def chunk(seq_id: SeqId, start: int, num_tokens: int) -> PrefillChunk:
    return PrefillChunk(seq_id, start, tuple(range(num_tokens)), samples=True)


def works(*plans: StepPlan) -> list[tuple[int, int, int]]:
    """Return (read, written, held) bytes of one layer in each plan."""
    work_of = PlanWork(SHAPE, price).work_of
    return [(work.read_bytes, work.written_bytes, work.held_bytes) for work in map(work_of, plans)]


def test_a_step_reads_the_blocks_before_it_and_writes_its_tokens() -> None:
    """A prompt's first chunk reads nothing; the next one reads five tokens, in two blocks of 40 bytes."""
    plans = (
        StepPlan(0, prefills=(chunk(A, 0, 5),)),
        StepPlan(1, prefills=(chunk(A, 5, 3), chunk(B, 0, 1))),
        StepPlan(2, decodes=(A, B)),
    )
    assert works(*plans) == [(0, 50, 80), (80, 40, 120), (120, 20, 160)]


def test_what_has_left_the_device_is_not_held() -> None:
    preempted = Preemption(A, PreemptionMode.SWAP, Reason.POOL_EXHAUSTED)
    plans = (
        StepPlan(0, prefills=(chunk(A, 0, 4), chunk(B, 0, 4))),
        StepPlan(1, decodes=(B,), preemptions=(preempted,)),
        StepPlan(2, prefills=(chunk(A, 4, 1),), released=(B,)),
    )
    assert works(*plans) == [(0, 80, 80), (40, 10, 80), (40, 10, 80)]


def test_a_plan_that_only_moves_kv_takes_no_time_and_is_noted() -> None:
    seen: list[StepPlan] = []

    def work_of(plan: StepPlan) -> LayerWork:
        seen.append(plan)
        return LayerWork((0.0,) * 6, 0, 0, 0)

    steps = LayeredSteps(AheadLayers(PLACES, LayerLink(1.0, 1.0)), work_of)
    assert (steps.time_s(StepPlan(7)), steps.costs, len(seen)) == (0.0, [], 1)


def run(policy: str, steps: LayeredSteps | None = None) -> Run:
    """Serve twice as many requests as the pool holds; without ``steps``, steps take the time of the line."""
    requests = make_burst(12, num_prompt=10, max_tokens=16)
    decider = make_policy(policy, SharingSettings(max_gap_s=2.0, slice_steps=5))
    made = begin(Machine(num_blocks=40), decider, requests, step_time_s=None if steps is None else steps.time_s)
    made.environment.run()
    assert not made.loop.has_unfinished
    return made


def layered(schedule: LayerSchedule) -> LayeredSteps:
    return LayeredSteps(schedule, PlanWork(SHAPE, lambda plan, _: LINE.time_s(plan)).work_of)


@pytest.mark.parametrize("policy", ["fcfs", "cfs", "fair", "paced"])
def test_a_loop_runs_on_layers_as_on_a_line_if_the_link_is_fast(policy: str) -> None:
    """With preemption, swap and recompute; the policy sees the same times and makes the same decisions."""
    steps = layered(AheadLayers(PLACES, LayerLink(float("inf"), float("inf"))))
    fast, line = run(policy, steps), run(policy)
    assert [plan.sampled for _, plan in fast.steps] == [plan.sampled for _, plan in line.steps]
    assert fast.elapsed_s == pytest.approx(line.elapsed_s)
    assert len(steps.costs) == sum(plan.num_tokens > 0 for _, plan in line.steps)
    assert sum(cost.inbound_bytes for cost in steps.costs) > 0
    assert sum(fast.counters.preemptions.values()) > 0


def test_over_a_slow_link_schedules_differ_as_they_should() -> None:
    link = LayerLink(60_000.0, 60_000.0, shares_duplex=True)
    fifo = PieFifo(6, PLACES.num_arenas)
    schedules = (AheadLayers(PLACES, link), OnDemandLayers(PLACES, link), PieLayers(fifo, link))
    ahead, on_demand, pie = (run("fcfs", layered(schedule)).elapsed_s for schedule in schedules)
    assert ahead < on_demand
    assert ahead < pie
