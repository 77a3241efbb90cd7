"""If swap space is slower than recomputing, no request takes turns; in virtual time.

A block of four tokens is computed in 1.2 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import median

import pytest

from floodplain.core.plan import Decision, Reason
from floodplain.core.tiers import Link, Tier
from floodplain.core.view import View
from floodplain.policy import fair, paced
from floodplain.policy.paced import STEPS_BESIDE
from floodplain.policy.ranking import LINK_USE, Slice
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from floodplain.runtime.prices import FORGET_STEPS
from tests.support.bursts import BLOCK_BYTES, LINE, Machine, Recorder, Run, begin, burst, make_burst
from tests.support.overload import MACHINE as QUICK

QUICK_S, SLOW_S = 0.0001, 0.005
REQUESTS = make_burst(40, interval_s=0.02, num_prompt=8, max_tokens=24)
# Without cached prefixes: copying those to swap space would keep blocks busy that FCFS without swap space could use.
SLOW = Machine(block_s=SLOW_S, caches_prefixes=False)
SHARING = ["cfs", "fair", "paced", "timely"]


def token_times(run: Run) -> list[list[float]]:
    return [list(one.token_times_s) for one in run.lifecycles.values()]


@pytest.mark.parametrize("name", ["cfs", "fair", "paced"])
def test_over_a_slow_link_there_are_no_turns_and_runs_equal_fcfs(name: str) -> None:
    policy = make_policy(name, SharingSettings(slice_steps=4))
    run, fcfs = burst(SLOW, policy, REQUESTS), burst(replace(SLOW, num_slots=0), make_policy("fcfs"), REQUESTS)
    assert token_times(run) == token_times(fcfs)
    assert run.counters.preemptions["swap"] == 0
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] > 100


def test_over_a_slow_link_timely_chooses_admissions_without_turns() -> None:
    recorder = Recorder(make_policy("timely", SharingSettings(slice_steps=4)))
    run = burst(SLOW, recorder, REQUESTS)
    assert turns([(view, decision) for view, _, decision in recorder.seen]) == 0
    assert run.counters.preemptions["swap"] == 0
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] > 100


@pytest.mark.parametrize("name", SHARING)
def test_over_a_quick_link_there_are_turns(name: str) -> None:
    run = burst(replace(SLOW, block_s=QUICK_S), make_policy(name, SharingSettings(slice_steps=4)), REQUESTS)
    assert run.counters.preemptions["swap"] > 20
    assert run.counters.limited_steps[Reason.SWAP_SLOW.value] == 0


def become(run: Run, block_s: float) -> None:
    run.links[Tier.HOST] = Link(Tier.HOST, BLOCK_BYTES / block_s)


def turns(seen: list[tuple[View, Decision]]) -> int:
    """Return how often a request was preempted for another one's turn."""
    orders = [order for _, decision in seen for order in decision.preemptions]
    return [order.reason for order in orders].count(Reason.SLICE_ENDED)


@pytest.mark.parametrize("name", SHARING)
def test_a_link_that_becomes_slow_ends_turns_and_all_requests_resume(name: str) -> None:
    """The policy measures copies. Those in flight at the change are slow too; no request is preempted then."""
    recorder = Recorder(make_policy(name, SharingSettings(slice_steps=4)))
    run = begin(Machine(block_s=QUICK_S, caches_prefixes=False), recorder, REQUESTS)
    slow_from_s = 0.6
    run.environment.schedule(slow_from_s, lambda: become(run, SLOW_S))
    run.environment.run()
    assert not run.loop.has_unfinished
    before, after = ([(v, d) for v, now, d in recorder.seen if (now > slow_from_s) is late] for late in (False, True))
    assert after[0][0].swapped  # some are swapped out
    told = next(index for index, (_, decision) in enumerate(after) if decision.reason is Reason.SWAP_SLOW)
    assert told < 30
    assert turns(before) > turns(after[:told])
    assert turns(after[told:]) < 5
    assert [decision.reason for view, decision in after if view.swapped].count(Reason.SWAP_SLOW) > 5


@pytest.mark.parametrize("name", SHARING)
def test_a_link_that_is_quick_again_is_tried_again(name: str) -> None:
    """Without turns nothing is copied and no price is measured, so old prices are discarded after some steps."""
    recorder = Recorder(make_policy(name, SharingSettings(slice_steps=4)))
    requests = make_burst(400, interval_s=0.045, num_prompt=8, max_tokens=24)
    run = begin(Machine(block_s=QUICK_S, caches_prefixes=False), recorder, requests)
    slow_from_s, quick_from_s = 0.6, 2.0
    run.environment.schedule(slow_from_s, lambda: become(run, SLOW_S))
    run.environment.schedule(quick_from_s, lambda: become(run, QUICK_S))
    run.environment.run()
    first_step = next(view.step for view, now, _ in recorder.seen if now > quick_from_s)
    after = [(view, decision) for view, now, decision in recorder.seen if now > quick_from_s]
    told = [(v, d) for v, d in after if v.step < first_step + FORGET_STEPS // 2]
    assert not turns(told)
    assert turns(after) > 10


# -- turns over a busy link, in virtual time ---------------------------------------------------------------------------


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
