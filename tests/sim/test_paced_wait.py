"""``paced`` under sustained overload, in virtual time: waits exceed FCFS's by at most a slice, and are even."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median, quantiles

import pytest

from floodplain.core.plan import Reason
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy import paced
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from floodplain.policy.turn import wants_one_token
from tests.support.bursts import Recorder, Run, burst, make_burst
from tests.support.overload import (
    CAPACITY,
    MACHINE,
    MAX_GAP_S,
    MAX_TOKENS,
    NUM_PROMPT,
    UNCROWDED,
    longest_step_s,
    overload,
)

SLICE = SharingSettings().slice_steps

# -- the wait for a first token --------------------------------------------------------------------------------------


def extra_waits_s(run: Run, in_line: Run) -> list[float]:
    """Return by how much longer than under FCFS every request waited for its first token; negative if it was sooner."""
    pairs = zip(run.lifecycles.values(), in_line.lifecycles.values(), strict=True)
    return [one.token_times_s[0] - other.token_times_s[0] for one, other in pairs]


def extra_bound_s(run: Run) -> float:
    """Return the bound for a request that FCFS starts at once: rest of a slice, swap-outs, its own prompt.

    Later arrivals wait for less of that slice, and prompts are computed no slower than they arrive: three are a step's
    share, and in its time two or three arrive. After that, requests wait under both policies until others finish,
    but here all earlier arrivals have begun sooner.
    """
    return ((SLICE - 1) + 1 + 1) * longest_step_s(run)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), [(2, 200), (3, 400)])
def test_no_first_token_is_later_than_in_line_by_over_a_slice_and_a_step(factor: float, num_requests: int) -> None:
    run, _ = overload(factor, num_requests, MAX_GAP_S)
    in_line, _ = overload(factor, num_requests, MAX_GAP_S, "fcfs")
    extra_s = extra_waits_s(run, in_line)
    assert max(extra_s) <= extra_bound_s(run)
    assert in_line.max_ttft_s > 2.0  # there is a line
    assert median(extra_s) < -1.0  # most are much sooner


@pytest.mark.slow
def test_newcomers_ranked_last_while_any_is_out_wait_longer_than_in_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = paced._judge

    def rank_last(
        view: View, now: float, fresh: Sequence[SequenceView], rotating: Sequence[SequenceView], told: SharingSettings
    ) -> paced._Newcomers:
        return paced._Newcomers((), fresh) if view.swapped else judge(view, now, fresh, rotating, told)

    in_line, _ = overload(2, 200, MAX_GAP_S, "fcfs")
    monkeypatch.setattr(paced, "_judge", rank_last)
    run, _ = overload.__wrapped__(2, 200, MAX_GAP_S)
    assert max(extra_waits_s(run, in_line)) > 2 * extra_bound_s(run)


def num_overtaken(lengths: Sequence[int], name: str = "paced", num_requests: int = 120) -> int:
    """Count first tokens that come before that of the preceding arrival, at three times capacity.

    A prompt token costs roughly as much of the device's time as a token of a stream.
    """
    interval_s = (sum(lengths) / len(lengths) + MAX_TOKENS) / (16 + MAX_TOKENS) / (3 * CAPACITY)
    requests = make_burst(num_requests, interval_s=interval_s, num_prompt=max(lengths), max_tokens=MAX_TOKENS)
    requests = [
        replace(one, prompt_token_ids=one.prompt_token_ids[: lengths[number % len(lengths)]])
        for number, one in enumerate(requests)
    ]
    run = burst(MACHINE, make_policy(name, SharingSettings(max_gap_s=MAX_GAP_S)), requests)
    assert run.counters.preemptions["swap"] > num_requests
    firsts_s = [one.token_times_s[0] for one in run.lifecycles.values()]
    return sum(later_s < earlier_s for earlier_s, later_s in pairwise(firsts_s))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(16,), (16, 96, 16, 40)])
def test_first_tokens_come_in_order_of_arrival_however_long_the_prompts(lengths: Sequence[int]) -> None:
    assert num_overtaken(lengths) == 0


@pytest.mark.slow
def test_under_cfs_a_short_prompt_passes_a_long_one() -> None:
    """Control: ``cfs`` ranks the least computed first."""
    assert num_overtaken((16, 96, 16, 40), "cfs", 80) > 10


# -- a crowd ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_overload_is_called_a_crowd_and_newcomers_wait_while_it_lasts() -> None:
    run, recorder = overload(3, 400, MAX_GAP_S)
    crowded = [(view, decision) for view, _, decision in recorder.seen if decision.reason is Reason.CROWDED]
    assert run.counters.limited_steps[Reason.CROWDED.value] > 100
    assert not any(decision.admissions for _, decision in crowded)
    assert all(any(row.status is Status.WAITING for row in view.waiting) for view, _ in crowded)


@pytest.mark.slow
def test_without_a_limit_on_gaps_the_device_is_never_crowded() -> None:
    run, _ = overload(3, 150, UNCROWDED)
    assert run.max_gap_s > 2 * MAX_GAP_S
    assert run.counters.limited_steps[Reason.CROWDED.value] == 0


# -- evenly ----------------------------------------------------------------------------------------------------------


def longest_gaps_s(run: Run) -> list[float]:
    """Return the longest silence of every request of the second half, which arrived during the crowd."""
    gaps_s = [max(one.itl_s) for one in run.lifecycles.values()]
    return gaps_s[len(gaps_s) // 2 :]


def spread(run: Run) -> float:
    """Return the 99th percentile of the longest silences, over their median."""
    gaps_s = longest_gaps_s(run)
    return quantiles(gaps_s, n=100)[-1] / median(gaps_s)


def even_spread(step_s: float) -> float:
    """Return the bound: the longest allowed silence, and one turn more: its slice, and copies out and in."""
    return (MAX_GAP_S + (SLICE + 2) * step_s) / MAX_GAP_S


@pytest.mark.slow
def test_service_degrades_evenly() -> None:
    run, _ = overload(3, 400, MAX_GAP_S)
    assert median(longest_gaps_s(run)) > MAX_GAP_S  # half of them reach the longest allowed silence
    assert spread(run) <= even_spread(longest_step_s(run))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfs", "fcfs"])
def test_under_cfs_and_fcfs_it_does_not(name: str) -> None:
    assert spread(overload(3, 150, MAX_GAP_S, name)[0]) > even_spread(0.031)


# -- ``paced`` under overload, in virtual time -------------------------------------------------------------------------


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
