"""An admitted request stays for a slice, whatever others need; in virtual time, without shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from floodplain.core.plan import Decision, Preemption, Reason
from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView, View
from floodplain.policy import fair, paced, turn
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, burst, make_burst
from tests.support.overload import MACHINE as LARGE

SETTINGS = SharingSettings(max_gap_s=1.0)
SLICE = SETTINGS.slice_steps

LARGE_BLOCKS = replace(LARGE, caches_prefixes=False)
SMALL_BLOCKS = Machine(num_slots=20_000, caches_prefixes=False)
BURSTS = {
    "twice": (LARGE_BLOCKS, make_burst(120, interval_s=1 / 52, num_prompt=16, max_tokens=64)),
    "slow copies": (
        replace(LARGE_BLOCKS, block_s=0.001),
        make_burst(120, interval_s=1 / 78, num_prompt=60, max_tokens=64),
    ),
    "all at once": (LARGE_BLOCKS, make_burst(100, num_prompt=30, max_tokens=64)),
    "small blocks": (SMALL_BLOCKS, make_burst(50, interval_s=0.02, num_prompt=8, max_tokens=40)),
}


@cache
def turned_out(name: str, load: str) -> list[tuple[Preemption, int, int]]:
    """Return (preemption, steps since its request entered the device, steps since it was admitted).

    The former are fewer if its KV was swapped in first.
    """
    recorder = Recorder(make_policy(name, SETTINGS))
    machine, requests = BURSTS[load]
    burst(machine, recorder, requests)
    let_in: dict[SeqId, int] = {}
    seen = []
    for view, _, decision in recorder.seen:
        entered = {row.seq_id: row.entered_step for row in view.running}
        for order in decision.preemptions:
            seen.append((order, view.step - entered[order.seq_id], view.step - let_in[order.seq_id]))
        let_in |= dict.fromkeys(names_let_in(decision), view.step)
    return seen


def names_let_in(decision: Decision) -> list[SeqId]:
    return [*(order.seq_id for order in decision.resumptions), *(chunk.seq_id for chunk in decision.admissions)]


@pytest.mark.slow
@pytest.mark.parametrize("load", BURSTS)
@pytest.mark.parametrize("name", ["fair", "paced"])
def test_an_admitted_request_stays_for_a_slice_and_a_turn_lasts_one(name: str, load: str) -> None:
    """No request is preempted, for any reason, within a slice of the decision that admitted it.

    No turn ends for another request within a slice of the step in which the request entered the device.
    """
    seen = turned_out(name, load)
    ended = [num_steps for order, num_steps, _ in seen if order.reason is Reason.SLICE_ENDED]
    assert len(ended) > 100
    assert min(ended) >= SLICE
    assert min(num_steps for _, _, num_steps in seen) >= SLICE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fair", "paced"])
def test_without_the_rule_requests_are_preempted_within_a_slice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fair, paced):
        monkeypatch.setattr(module, "rows_in_slice", lambda view, slice_steps: [])
    seen = [num_steps for _, num_steps, _ in turned_out.__wrapped__(name, "twice")]
    assert sum(num_steps < SLICE for num_steps in seen) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fair", "paced"])
def test_without_reserved_room_requests_are_preempted_within_a_slice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_due(view: View, row: SequenceView, num_steps: int) -> int:
        return 0

    monkeypatch.setattr(turn, "blocks_due", nothing_due)
    seen = [(order.reason, num_steps) for order, _, num_steps in turned_out.__wrapped__(name, "small blocks")]
    assert sum(reason is Reason.POOL_EXHAUSTED and num_steps < SLICE for reason, num_steps in seen) > 5


@pytest.mark.slow
@pytest.mark.parametrize("load", BURSTS)
def test_under_fair_a_slice_on_the_device_is_whole_for_any_reason(load: str) -> None:
    assert min(num_steps for _, num_steps, _ in turned_out("fair", load)) >= SLICE


@pytest.mark.slow
@pytest.mark.parametrize("load", BURSTS)
def test_under_paced_it_nearly_always_is(load: str) -> None:
    """Room is reserved from the decision on, not for the growth of others after a swap-in that takes steps."""
    seen = [num_steps for _, num_steps, _ in turned_out("paced", load)]
    assert sum(num_steps < SLICE for num_steps in seen) <= 0.02 * len(seen)
