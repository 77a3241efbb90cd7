"""The default policy under overload, in virtual time: who is silent, who waits, and in which order work finishes.

The machine serves about 26 of these requests a second: 25 at a time, 64 steps of 15 ms each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest

from floodplain.core.plan import Reason
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.batching import wants_one_token
from floodplain.policy.paced import PacedPolicy, divide
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, Run, burst, make_burst

MACHINE = Machine(
    num_blocks=100,
    block_tokens=16,
    num_slots=20_000,
    block_s=5e-5,
    max_num_seqs=256,
    max_batched_tokens=256,
)
CAPACITY = 26.0
NUM_PROMPT, MAX_TOKENS = 16, 64
LARGEST = -(-(NUM_PROMPT + MAX_TOKENS) // MACHINE.block_tokens)
"""Blocks of a request at its end."""

MAX_GAP_S = 1.0
UNCROWDED = 1e9
"""A gap that nobody reaches: the rule never holds."""


@cache
def overload(factor: float, num_requests: int, max_gap_s: float, name: str = "paced") -> tuple[Run, Recorder]:
    """Requests at ``factor`` times the rate that the machine can serve."""
    recorder = Recorder(make_policy(name, SharingSettings(max_gap_s=max_gap_s)))
    interval_s = 1 / (factor * CAPACITY)
    requests = make_burst(num_requests, interval_s=interval_s, num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)
    return burst(MACHINE, recorder, requests), recorder


def longest_step_s(run: Run) -> float:
    return max(MACHINE.line.time_s(plan) for _, plan in run.steps)


# -- silence ---------------------------------------------------------------------------------------------------------


def silence_bound_s(factor: float, step_s: float) -> float:
    """``max_gap_s``, and one more cycle of turns for those who came before the first silence of that length showed.

    Somebody is silent for ``max_gap_s`` before newcomers are stopped, and in that time some arrive. Each adds one turn
    of a slice to the cycle, on two blocks (its prompt and its first block of tokens), in the visitors' part less what
    is left over when turns do not fill it. At last the turn itself must begin: copies out and in, a step each, and a
    slice that has just begun.
    """
    settings = SharingSettings()
    part = settings.visitor_share * MACHINE.num_blocks - (LARGEST + 1)
    turn_s = settings.slice_steps * step_s
    num_arrived = factor * CAPACITY * MAX_GAP_S
    return MAX_GAP_S + num_arrived * 2 / part * turn_s + turn_s + 2 * step_s


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), [(2, 200), (3, 600)])
def test_nobody_is_silent_for_longer_than_the_gap_and_one_more_cycle(factor: float, num_requests: int) -> None:
    run, _ = overload(factor, num_requests, MAX_GAP_S)
    assert run.max_gap_s > MAX_GAP_S  # it is an overload
    assert run.max_gap_s <= silence_bound_s(factor, longest_step_s(run))
    assert run.counters.preemptions["recompute"] == 0


@pytest.mark.slow
def test_without_the_crowding_rule_silence_grows_as_long_as_the_overload_lasts() -> None:
    """The control: three times as long at half of the requests, and longer still at all of them."""
    bound_s = silence_bound_s(3, longest_step_s(overload(3, 600, UNCROWDED)[0]))
    half_s, whole_s = (overload(3, number, UNCROWDED)[0].max_gap_s for number in (300, 600))
    assert bound_s < half_s < whole_s
    assert whole_s > 3 * bound_s


@pytest.mark.slow
def test_cfs_silences_the_old_ones_too() -> None:
    assert overload(3, 300, MAX_GAP_S, "cfs")[0].max_gap_s > silence_bound_s(3, 0.03)


def visitors_of(view: View) -> list[SequenceView]:
    rows = (*view.running, *view.loading, *view.swapped)
    streams = sorted((row for row in rows if row.num_generated(view.step)), key=lambda row: row.order_key)
    return divide(view, streams, SharingSettings(max_gap_s=MAX_GAP_S))[1]


@pytest.mark.slow
def test_the_one_that_has_been_silent_longest_comes_first() -> None:
    """While a visitor waits, none that has been silent for a shorter time gets a turn."""
    num_turns = 0
    for view, _, decision in overload(2, 200, MAX_GAP_S)[1].seen:
        came = {order.seq_id for order in decision.resumptions}
        absent = [row for row in visitors_of(view) if row.status is Status.SWAPPED]
        silences = [row.last_token_s or 0.0 for row in absent if row.seq_id in came]
        waits = [row.last_token_s or 0.0 for row in absent if row.seq_id not in came and not row.is_leaving]
        assert max(silences, default=0.0) <= min(waits, default=math.inf)
        num_turns += len(silences)
    assert num_turns > 300


# -- first tokens ----------------------------------------------------------------------------------------------------


def waits_without_a_crowd(run: Run, recorder: Recorder) -> Iterator[tuple[float, int]]:
    """(TTFT, newcomers before it in line) of every request during whose wait no newcomers were stopped."""
    stopped = [now for _, now, decision in recorder.seen if decision.reason in (Reason.CROWDED, Reason.SWAP_FULL)]
    lives = list(run.lifecycles.values())
    for number, one in enumerate(lives):
        first_s = one.token_times_s[0]
        if not any(one.arrival_s <= when <= first_s for when in stopped):
            ahead = sum(other.token_times_s[0] > one.arrival_s for other in lives[:number])
            yield first_s - one.arrival_s, ahead


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 3])
def test_while_nobody_is_crowded_first_tokens_are_a_matter_of_steps(factor: float) -> None:
    """A slice that has just begun, a copy out, its own step; and the prompts before it, at half of each step's time."""
    run, recorder = overload(factor, 200, MAX_GAP_S)
    prompt_tokens_per_step = MACHINE.line.base_s / MACHINE.line.prefill_token_s  # of the shortest step that there is
    num_seen = 0
    for ttft_s, ahead in waits_without_a_crowd(run, recorder):
        num_steps = 4 + 1 + 1 + math.ceil((ahead + 1) * NUM_PROMPT / prompt_tokens_per_step)
        assert ttft_s <= num_steps * longest_step_s(run)
        num_seen += 1
    assert num_seen > 50


@pytest.mark.slow
def test_under_fcfs_first_tokens_wait_for_others_to_finish() -> None:
    """The control: with the same load, in seconds instead of steps."""
    run, recorder = overload(2, 200, MAX_GAP_S, "fcfs")
    assert max(ttft_s for ttft_s, _ in waits_without_a_crowd(run, recorder)) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("prefill_share", [0.25, 0.5, 0.75])
def test_prompts_take_no_more_than_their_share_of_a_step(prefill_share: float) -> None:
    """Beside streams, and once a lone request has shown what steps cost; or one block, where the share is less."""
    settings = SharingSettings(prefill_share=prefill_share, max_gap_s=UNCROWDED)
    recorder = Recorder(PacedPolicy(settings))  # without the gate: FCFS knows no share
    requests = make_burst(100, interval_s=0.02, first_s=1.0, num_prompt=100, max_tokens=32)
    burst(MACHINE, recorder, [*make_burst(1), *requests])
    num_limited = 0
    for view, _, decision in recorder.seen:
        if any(wants_one_token(view, row) for row in view.running) and view.prices.step_s:
            chunks = (*decision.chunks, *decision.admissions)
            num_tokens = sum(chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1)
            prompt_s = num_tokens * view.prices.prefill_token_s
            assert prompt_s <= (prompt_s + view.prices.step_s) * prefill_share or num_tokens <= MACHINE.block_tokens
            num_limited += num_tokens > 0
    assert num_limited > 50


# -- work ------------------------------------------------------------------------------------------------------------


def largest_lead(run: Run) -> int:
    """How many requests later somebody came who finished earlier, at most."""
    ends = [one.token_times_s[-1] for one in run.lifecycles.values()]
    return max(
        later - earlier
        for earlier in range(len(ends))
        for later in range(earlier, len(ends))
        if ends[later] <= ends[earlier]
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 3])
def test_work_finishes_in_order_of_arrival_up_to_a_batch(factor: float) -> None:
    run, _ = overload(factor, 300, MAX_GAP_S)
    batch = max(len(plan.decodes) + len(plan.prefills) for _, plan in run.steps)
    assert largest_lead(run) <= batch


@pytest.mark.slow
def test_under_fair_shares_it_does_not() -> None:
    run, _ = overload(2, 300, MAX_GAP_S, "fair")
    batch = max(len(plan.decodes) + len(plan.prefills) for _, plan in run.steps)
    assert largest_lead(run) > 3 * batch


@pytest.mark.slow
def test_taking_turns_costs_little_of_the_devices_time() -> None:
    """Everything is done about as early as under FCFS, and the device does not wait for copies."""
    paced, fcfs = (overload(2, 200, MAX_GAP_S, name)[0] for name in ("paced", "fcfs"))
    assert paced.elapsed_s <= 1.1 * fcfs.elapsed_s
    assert paced.instance.stall_s <= 0.01 * paced.elapsed_s
