"""``timely`` where the cores that compute make the copies, too, in virtual time: steps beside copies are slower."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.step_line import StepLine
from floodplain.core.lifecycle import inter_token_latencies_s, time_per_output_token_s
from floodplain.core.plan import StepPlan
from floodplain.core.request import UNLOADED_FACTOR, Request
from floodplain.core.tiers import Link, Tier
from floodplain.core.view import Prices
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.serving import Served, VirtualDevice, serve
from tests.support.bursts import make_burst

LINE = StepLine(base_s=0.0132, decode_s=0.00064, prefill_token_s=0.0005)
BLOCK_S, BLOCK_BYTES = 0.001, 1_000_000
TPOT_GOAL_S = UNLOADED_FACTOR * (LINE.base_s + LINE.decode_s)
NUM_REQUESTS, RATE = 120, 5.0
MAX_GAP_S = 2.0


def step_time_s(plan: StepPlan) -> float:
    """Each copied block takes its time from the step beside which it is copied."""
    computing_s = LINE.time_s(plan)
    num_blocks = sum(len(transfer.blocks) for transfer in plan.transfers)
    return computing_s + BLOCK_S * num_blocks if computing_s else 0.0


def requests() -> list[Request]:
    return make_burst(NUM_REQUESTS, interval_s=1 / RATE, num_prompt=200, max_tokens=150)


@cache
def play(policy: str) -> tuple[Served, Prices]:
    """Serve about 1.5 times what the device can; the prices of its last step, and what happened."""
    device = VirtualDevice(
        step_time_s=step_time_s,
        num_blocks=128,
        block_tokens=32,
        config=LoopConfig(max_model_len=1024, block_bytes=BLOCK_BYTES),
        link=Link(Tier.HOST, BLOCK_BYTES / BLOCK_S),
        num_swap_slots=0 if policy == "fcfs" else 1024,
        caches_prefixes=False,
    )
    settings = settings_for(policy, max_gap_s=MAX_GAP_S)
    prices = [Prices()]

    def note(state: LoopState, _: float) -> None:
        prices.append(state.prices.now)

    served = serve(requests(), make_policy(policy, settings), device, on_step=note)
    return served, max(prices[len(prices) // 4 :], key=lambda one: one.unloaded_step_s)


def attained(policy: str) -> float:
    goal_s = UNLOADED_FACTOR * (LINE.base_s + 200 * LINE.prefill_token_s)
    lives = play(policy)[0].lifecycles
    good = [
        (life.ttft_s or 0.0) <= goal_s and (time_per_output_token_s(life.token_times_s) or 0.0) <= TPOT_GOAL_S
        for life in lives
    ]
    return sum(good) / len(good)


@pytest.mark.slow
def test_the_goal_that_follows_the_machine_does_not_grow_with_copies() -> None:
    """The second line is the control: the price that has copies in it would make goals a fifth longer."""
    _, prices = play("timely")
    assert UNLOADED_FACTOR * prices.unloaded_step_s == pytest.approx(TPOT_GOAL_S, rel=0.02)
    assert UNLOADED_FACTOR * prices.lone_step_s > 1.2 * TPOT_GOAL_S


@pytest.mark.slow
def test_more_requests_attain_both_goals_and_no_stream_is_silent_for_long() -> None:
    served, _ = play("timely")
    print(f"attained {attained('timely'):.2f}, fcfs {attained('fcfs'):.2f}; {served.counters.preemptions}")
    assert attained("timely") > 1.5 * attained("fcfs")
    gaps_s = [max(inter_token_latencies_s(life.token_times_s)) for life in served.lifecycles]
    assert max(gaps_s) <= MAX_GAP_S + 0.5
