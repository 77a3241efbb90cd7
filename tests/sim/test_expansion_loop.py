"""The controller beside the real loop, which preempts by recomputing, in virtual time."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest

from floodplain.core.request import Request
from tests.support.bursts import Machine
from tests.support.expanding_loop import run_loop
from tests.support.loops import make_request

NUM_REQUESTS = 260


def machine(num_blocks: int) -> Machine:
    return Machine(
        num_blocks=num_blocks, block_tokens=16, num_slots=0, max_num_seqs=1024, max_batched_tokens=4096,
        max_model_len=1000, caches_prefixes=False,
    )  # fmt: skip


def requests(num_requests: int = NUM_REQUESTS, interval_s: float = 0.0) -> list[Request]:
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


@pytest.mark.parametrize("num_blocks", [300, 600])
def test_auto_finishes_nearly_as_soon_as_the_best_fixed_number(num_blocks: int) -> None:
    """All requests are there from the start, so the way up counts, and the end, when nothing waits."""
    auto, _, _ = run_loop(machine(num_blocks), requests())
    elapsed_s = sum(step_s + stall_s for step_s, stall_s, _ in auto.told)
    most = max(number for _, _, number in auto.told)
    fixed = {n: run_loop(machine(num_blocks), requests(), n)[2].now for n in (0, most - 2, most, most + 1, most + 2)}
    assert elapsed_s <= min(fixed.values()) / 0.95
    assert elapsed_s < 0.85 * fixed[0]
    assert sum(stall_s for _, stall_s, _ in auto.told) < 0.01 * elapsed_s


def test_half_a_link_is_answered_although_the_pool_is_full() -> None:
    """Blocks are in use, so that the pool shrinks as requests end or are preempted."""
    lost_s = 15.0
    auto, _, _ = run_loop(machine(300), requests(), links={lost_s: 0.06})
    ends = list(accumulate(step_s + stall_s for step_s, stall_s, _ in auto.told))
    lost = next(at for at, end in enumerate(ends) if end > lost_s)
    settled = auto.told[lost + 100 :]
    assert auto.told[lost + 100][2] < auto.told[lost][2]
    assert ends[lost + 100] - ends[lost] < 5.0
    assert sum(stall_s for _, stall_s, _ in settled) < 0.01 * sum(step_s for step_s, _, _ in settled)


def test_requests_that_fit_let_nothing_stream() -> None:
    auto, _, _ = run_loop(machine(300), requests(60, interval_s=0.6))
    assert {number for _, _, number in auto.told} == {0}
