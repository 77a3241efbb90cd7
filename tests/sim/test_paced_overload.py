"""``paced`` under overload, in virtual time: waits for a first token, and the order in which work finishes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from floodplain.core.plan import Reason
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.settings import SharingSettings
from floodplain.policy.turn import wants_one_token
from tests.support.bursts import Recorder, Run, burst, make_burst
from tests.support.overload import MACHINE, MAX_GAP_S, NUM_PROMPT, UNCROWDED, longest_step_s, overload

# -- first tokens ----------------------------------------------------------------------------------------------------


def waits_without_a_crowd(run: Run, recorder: Recorder) -> Iterator[tuple[float, int]]:
    """Yield (TTFT, newcomers before it in line) of every request during whose wait no newcomers were stopped."""
    stopped = [now for _, now, decision in recorder.seen if decision.reason in (Reason.CROWDED, Reason.SWAP_FULL)]
    lives = list(run.lifecycles.values())
    for number, one in enumerate(lives):
        first_s = one.token_times_s[0]
        if not any(one.arrival_s <= when <= first_s for when in stopped):
            ahead = sum(other.token_times_s[0] > one.arrival_s for other in lives[:number])
            yield first_s - one.arrival_s, ahead


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 3])
def test_unless_crowded_first_tokens_take_a_few_steps(factor: float) -> None:
    """The bound: a slice just begun, a swap-out, its own step, and the prompts before it at half of each step."""
    run, recorder = overload(factor, 200, MAX_GAP_S)
    prompt_tokens_per_step = MACHINE.line.base_s / MACHINE.line.prefill_token_s  # of the shortest possible step
    num_seen = 0
    for ttft_s, ahead in waits_without_a_crowd(run, recorder):
        num_steps = 4 + 1 + 1 + math.ceil((ahead + 1) * NUM_PROMPT / prompt_tokens_per_step)
        assert ttft_s <= num_steps * longest_step_s(run)
        num_seen += 1
    assert num_seen > 50


@pytest.mark.slow
def test_under_fcfs_first_tokens_wait_for_others_to_finish() -> None:
    """Control: the same load, in seconds instead of steps."""
    run, recorder = overload(2, 200, MAX_GAP_S, "fcfs")
    assert max(ttft_s for ttft_s, _ in waits_without_a_crowd(run, recorder)) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("prefill_share", [0.25, 0.5, 0.75])
def test_prompts_take_no_more_than_their_share_of_a_step(prefill_share: float) -> None:
    """Beside streams, once a lone request has determined the cost of steps; at least one block."""
    settings = SharingSettings(prefill_share=prefill_share, max_gap_s=UNCROWDED, prompt_share=1.0)
    recorder = Recorder(PacedPolicy(settings))  # without the gate: FCFS has no share
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
    """Return the most arrivals by which a request finished ahead of an earlier one."""
    ends = [one.token_times_s[-1] for one in run.lifecycles.values()]
    return max(
        later - earlier
        for earlier in range(len(ends))
        for later in range(earlier, len(ends))
        if ends[later] <= ends[earlier]
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 3])
def test_work_finishes_in_order_of_arrival_up_to_two_batches(factor: float) -> None:
    """Rotating streams on time may end before the core does: a batch of them, beside the core's batch."""
    run, _ = overload(factor, 300, MAX_GAP_S)
    batch = max(len(plan.decodes) + len(plan.prefills) for _, plan in run.steps)
    assert largest_lead(run) <= 2 * batch


@pytest.mark.slow
def test_under_fair_shares_it_does_not() -> None:
    run, _ = overload(2, 300, MAX_GAP_S, "fair")
    batch = max(len(plan.decodes) + len(plan.prefills) for _, plan in run.steps)
    assert largest_lead(run) > 3 * batch


@pytest.mark.slow
def test_taking_turns_costs_little_of_the_devices_time() -> None:
    """Work finishes about as early as under FCFS, and the device does not wait for copies."""
    paced, fcfs = (overload(2, 200, MAX_GAP_S, name)[0] for name in ("paced", "fcfs"))
    assert paced.elapsed_s <= 1.1 * fcfs.elapsed_s
    assert paced.instance.stall_s <= 0.01 * paced.elapsed_s
