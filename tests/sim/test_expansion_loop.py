"""The controller beside the real loop, which preempts by recomputing, in virtual time."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest

from benchmarks.expansion.expanding import closed_form
from floodplain.core.layer_places import every_place
from floodplain.core.request import Request
from floodplain.policy.expansion import ExpansionPolicy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.sim.environment import Environment
from floodplain.sim.expanding import ExpandingPool, ExpandingStep
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from tests.support.bursts import BLOCK_BYTES, Machine
from tests.support.loops import make_request

EVERY = tuple(every_place(32))
NUM_REQUESTS = 260
Steps = list[ExpandingStep]


def run(num_blocks: int, requests: list[Request], fixed: int | None = None, half_link_s: float = float("inf")) -> Steps:
    """Serve all requests with a fixed number of streamed layers or ``auto``; half the link from ``half_link_s`` on."""
    machine = Machine(
        num_blocks=num_blocks, block_tokens=16, num_slots=0, max_num_seqs=1024, max_batched_tokens=4096,
        max_model_len=1000, caches_prefixes=False,
    )  # fmt: skip
    loop, environment = machine.make_loop(FcfsPolicy()), Environment()
    costs = closed_form(weights_s=0.02, block_s=1e-5, token_s=2e-5, link_ratio=0.12)
    places = EVERY if fixed is None else tuple(one for one in EVERY if one.num_streamed == fixed)
    pool = ExpandingPool(loop, places, costs, ExpansionPolicy(EVERY, num_blocks) if fixed is None else None)
    instance = VirtualInstance(environment, loop, pool.step_time_s, VirtualLinks({}, BLOCK_BYTES))
    instance.on_boundary = pool.at_boundary
    for request in requests:
        environment.schedule(request.arrival_s, lambda request=request: instance.submit(request))  # type: ignore[misc]
    if half_link_s < float("inf"):
        environment.schedule(half_link_s, lambda: setattr(costs, "block_s", 2 * costs.block_s))
    environment.run()
    assert not loop.has_unfinished
    loop.check_integrity()
    return pool.steps


def make_requests(num_requests: int = NUM_REQUESTS, interval_s: float = 0.0) -> list[Request]:
    dice = Random(1)
    return [
        make_request(
            f"r{index}",
            tuple(range(1000 * index, 1000 * index + dice.randint(30, 150))),
            index * interval_s,
            max_tokens=dice.randint(60, 240),
            ignore_eos=True,
        )
        for index in range(1, num_requests + 1)
    ]


def elapsed_s(steps: Steps) -> float:
    return sum(step.step_s + step.stall_s for step in steps)


def stall_share(steps: Steps) -> float:
    return sum(step.stall_s for step in steps) / elapsed_s(steps)


@pytest.mark.parametrize("num_blocks", [300, 600])
def test_auto_finishes_nearly_as_soon_as_the_best_fixed_number(num_blocks: int) -> None:
    """All requests arrive at the start, so the increase of layers counts, and the end, when nothing waits."""
    auto = run(num_blocks, make_requests())
    most = max(step.num_streamed for step in auto)
    numbers = (0, most, most + 1, most + 2)
    fixed_s = {number: elapsed_s(run(num_blocks, make_requests(), number)) for number in numbers}
    assert elapsed_s(auto) <= min(fixed_s.values()) / 0.95
    assert elapsed_s(auto) < 0.85 * fixed_s[0]
    assert stall_share(auto) < 0.01


def test_half_a_link_is_answered_although_the_pool_is_full() -> None:
    """Blocks are in use, so the pool shrinks as requests end or are preempted."""
    lost_s = 15.0
    steps = run(300, make_requests(), half_link_s=lost_s)
    ends_s = list(accumulate(step.step_s + step.stall_s for step in steps))
    lost = next(at for at, end_s in enumerate(ends_s) if end_s > lost_s)
    assert steps[lost + 100].num_streamed < steps[lost].num_streamed
    assert ends_s[lost + 100] - ends_s[lost] < 5.0
    assert stall_share(steps[lost + 100 :]) < 0.01


def test_requests_that_fit_let_nothing_stream() -> None:
    assert {step.num_streamed for step in run(300, make_requests(60, interval_s=0.6))} == {0}
