"""Turns over a busy link, in virtual time: slices grow until the copies of the next one overlap with them.

A block is computed in 9.6 ms, and a copy takes less than half of that: turns pay. But copies of all streams that take
turns last longer than the configured slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import median

import pytest

from floodplain.core.plan import Reason
from floodplain.policy import fair, paced
from floodplain.policy.paced import STEPS_BESIDE
from floodplain.policy.ranking import LINK_USE, Slice
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import LINE, Recorder, Run, burst, make_burst
from tests.support.overload import MACHINE as QUICK

MACHINE = replace(QUICK, caches_prefixes=False, line=replace(LINE, prefill_token_s=0.0006))
SETTINGS = SharingSettings(max_gap_s=2.0, rotation_share=0.5, slice_steps=5)

ROTATION = int(SETTINGS.rotation_share * MACHINE.num_blocks)
CASES = [("paced", 0.004, ROTATION), ("fair", 0.0016, MACHINE.num_blocks)]
"""Policy, seconds of a block on the link, and number of blocks that take turns: a part of the pool, or all of it."""

BESIDE = {"paced": STEPS_BESIDE, "fair": 0}
"""Steps for which a turn holds its blocks, beside its slice."""


Stay = tuple[int, float]
"""(steps of a stay that ended with its slice, steps in which the link copies one block)."""


def stays(recorder: Recorder) -> Iterator[Stay]:
    for view, _, decision in recorder.seen:
        entered = {row.seq_id: row.entered_step for row in view.running}
        for order in decision.preemptions:
            if order.reason is Reason.SLICE_ENDED and view.prices.step_s:
                yield view.step - entered[order.seq_id], view.tiers[0].block_s / LINK_USE / view.prices.step_s


@cache
def run_burst(
    name: str, block_s: float, num_requests: int = 200, is_synchronous: bool = False
) -> tuple[Run, list[Stay]]:
    """Serve a burst at one and a half times the machine's capacity."""
    recorder = Recorder(make_policy(name, replace(SETTINGS, is_synchronous=is_synchronous)))
    requests = make_burst(num_requests, interval_s=1 / 40, num_prompt=16, max_tokens=64)
    return burst(replace(MACHINE, block_s=block_s), recorder, requests), list(stays(recorder))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block_s", "num_blocks"), CASES)
def test_a_slice_lasts_as_long_as_the_copies_of_the_next_one(name: str, block_s: float, num_blocks: int) -> None:
    """The median slice is two to three times the configured one."""
    run, seen = run_burst(name, block_s)
    assert len(seen) > 200
    beside = BESIDE[name]
    assert all(num_steps + beside >= num_blocks * per_block for num_steps, per_block in seen)
    assert 2 <= median(num_blocks * per_block - beside for _, per_block in seen) / SETTINGS.slice_steps <= 3
    assert run.counters.limited_steps[Reason.LINK_BUSY.value] > 100


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block_s", "num_blocks"), CASES)
def test_slices_of_the_set_length_end_before_the_copies(
    name: str, block_s: float, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fair, paced):
        monkeypatch.setattr(module, "slice_for", lambda view, num_blocks, settings, *_: Slice(settings.slice_steps))
    run, seen = run_burst.__wrapped__(name, block_s)
    assert sum(num_steps + BESIDE[name] < num_blocks * per_block for num_steps, per_block in seen) > 100
    assert run.counters.limited_steps[Reason.LINK_BUSY.value] == 0


@pytest.mark.slow
def test_over_a_quick_link_slices_have_the_set_length() -> None:
    run, seen = run_burst("paced", QUICK.block_s)
    assert run.counters.limited_steps[Reason.LINK_BUSY.value] == 0
    assert min(num_steps for num_steps, _ in seen) == SETTINGS.slice_steps


@pytest.mark.slow
@pytest.mark.parametrize("block_s", [QUICK.block_s, 0.0016, 0.004])
def test_the_device_does_not_wait_for_the_link(block_s: float) -> None:
    run, in_line = (run_burst(name, block_s)[0] for name in ("paced", "fcfs"))
    assert run.counters.preemptions["swap"] > 200
    assert run.instance.stall_s <= 0.02 * run.elapsed_s
    assert run.elapsed_s <= 1.1 * in_line.elapsed_s


@pytest.mark.slow
def test_in_aquas_switch_it_does() -> None:
    """Control: AQUA's switch waits for copies."""
    run, _ = run_burst("cfs", 0.004, 80, is_synchronous=True)
    assert run.instance.stall_s > 0.1 * run.elapsed_s
