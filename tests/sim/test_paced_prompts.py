"""``paced`` under overload by long prompts, in virtual time: streams do not wait for them.

Prompts have 200 to 400 tokens. Four of them would fit into one step beside all the streams: such a step would last ten
times as long as one that only decodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from floodplain.policy import turn
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Run, burst, make_burst
from tests.support.overload import MACHINE as SMALL

LENGTHS = (200, 300, 400, 250)
OUTPUT = 300
MACHINE = replace(SMALL, num_blocks=600, max_model_len=800, max_batched_tokens=1024)
MAX_GAP_S = 0.5
SETTINGS = SharingSettings(max_gap_s=MAX_GAP_S, prompt_share=1.0, tpot_goal_s=1e-3)
"""First tokens first, even where prompts are most of the work: see ``test_paced_prompt_bound.py``. No goal can be kept,
so the rotation's part is small."""


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // MACHINE.block_tokens)


MEAN_PROMPT = sum(LENGTHS) / len(LENGTHS)
LARGEST = blocks_of(max(LENGTHS) + OUTPUT)


def capacity(num_output: int) -> float:
    """Return the requests per second of a full device: the time of a prompt, and of a request's part of the steps."""
    num_streams = MACHINE.num_blocks / blocks_of(int(MEAN_PROMPT) + num_output)
    line = MACHINE.line
    return 1 / (MEAN_PROMPT * line.prefill_token_s + num_output * (line.base_s / num_streams + line.decode_s))


@cache
def overload(
    factor: float, num_requests: int, num_output: int = OUTPUT, name: str = "paced", is_warm: bool = True
) -> Run:
    """Serve long prompts at ``factor`` times the machine's rate; if warm, a lone request is served before."""
    interval_s = 1 / (factor * capacity(num_output))
    requests = make_burst(num_requests, interval_s=interval_s, first_s=1.0, num_prompt=400, max_tokens=num_output)
    requests = [
        replace(one, prompt_token_ids=one.prompt_token_ids[: LENGTHS[number % len(LENGTHS)]])
        for number, one in enumerate(requests)
    ]
    return burst(MACHINE, make_policy(name, SETTINGS), [*make_burst(is_warm), *requests])


def step_bound_s() -> float:
    """Return the longest step: the most possible streams, all of one kind of prompts, and the prompts' share.

    A resumed request computes its token as a chunk, which may cost more than a decode.
    """
    line, num_streams = MACHINE.line, MACHINE.num_blocks // blocks_of(min(LENGTHS))
    streams_s = line.base_s + num_streams * max(line.decode_s, line.prefill_token_s)
    return streams_s / (1 - SETTINGS.prefill_share)


def silence_bound_s() -> float:
    """Return ``max_gap_s``, plus turns of requests whose prompts are computed then, plus one turn with its copies.

    Prompts get their share of that time. Each adds its blocks to the rotation, one of them partly filled and one for
    its first output tokens; their part of the pool lacks the largest request's blocks if turns do not fill it.
    """
    turn_s = SETTINGS.slice_steps * step_bound_s()
    num_tokens = SETTINGS.prefill_share * MAX_GAP_S / MACHINE.line.prefill_token_s
    num_blocks = num_tokens / MACHINE.block_tokens + 2 * num_tokens / min(LENGTHS)
    part = SETTINGS.rotation_share * MACHINE.num_blocks - (LARGEST + 1)
    return MAX_GAP_S + num_blocks / part * turn_s + turn_s + 2 * step_bound_s()


def steps_in_turns_s(run: Run) -> list[float]:
    """Return device times of steps from the first preemption to the last: FCFS has no share."""
    left = [number for number, (_, plan) in enumerate(run.steps) if plan.preemptions]
    return [MACHINE.line.time_s(plan) for _, plan in run.steps[left[0] : left[-1] + 1] if plan.decodes]


CASES = [(2, 100), (3, 80)]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), CASES)
def test_no_step_with_streams_is_longer_than_the_prompts_share_makes_it(factor: float, num_requests: int) -> None:
    run = overload(factor, num_requests)
    assert len(steps_in_turns_s(run)) > 300
    assert max(steps_in_turns_s(run)) <= step_bound_s()


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), CASES)
def test_long_prompts_lengthen_silence_by_their_share_and_a_turn_at_most(factor: float, num_requests: int) -> None:
    run = overload(factor, num_requests)
    assert MAX_GAP_S < run.max_gap_s <= silence_bound_s()
    assert run.counters.limited_steps["crowded"] > 0


@pytest.mark.slow
def test_without_their_share_prompts_make_steps_long_and_silence_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "prefill_cap", lambda view, share: view.max_batched_tokens)
    run = overload.__wrapped__(*CASES[1])
    assert max(steps_in_turns_s(run)) > 5 * step_bound_s()
    assert run.max_gap_s > silence_bound_s()


# -- prompts that are most of the work -------------------------------------------------------------------------------

SHORT = 64
"""Tokens of output: prompts are seven tenths of the work."""


@pytest.mark.slow
def test_prompts_that_are_most_of_the_work_end_about_as_early_as_in_line() -> None:
    """A fixed bug: a short lone prompt looked too dear, so prompts got 16 tokens a step and 500 blocks were idle."""
    run, in_line = (overload(2, 100, SHORT, name) for name in ("paced", "fcfs"))
    assert run.elapsed_s <= 1.1 * in_line.elapsed_s
    assert run.max_ttft_s <= in_line.max_ttft_s + 1.0


@pytest.mark.slow
def test_prompts_take_no_more_than_their_share_from_the_first_turn_on() -> None:
    """The machine has just started: no step without a prompt has run."""
    run = overload(2, 100, SHORT, "paced", False)
    assert max(steps_in_turns_s(run)) <= step_bound_s()
