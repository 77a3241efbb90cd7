"""Overload in virtual time: requests arrive at a multiple of the rate that a machine can serve.

The machine serves about 26 of these requests a second: 25 at a time, 64 steps of 15 ms each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from floodplain.core.request import Goals
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

MAX_GAP_S = 1.0
UNCROWDED = 1e9
"""A gap that is never reached: no crowding."""


@cache
def overload(
    factor: float,
    num_requests: int,
    max_gap_s: float,
    name: str = "paced",
    tpot_goal_s: float | None = None,
    goals_s: Sequence[float | None] = (None,),
) -> tuple[Run, Recorder]:
    """Serve requests at ``factor`` times the machine's rate; ``goals_s`` are their TPOT goals, in turn."""
    recorder = Recorder(make_policy(name, SharingSettings(max_gap_s=max_gap_s, tpot_goal_s=tpot_goal_s)))
    interval_s = 1 / (factor * CAPACITY)
    requests = make_burst(num_requests, interval_s=interval_s, num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)
    requests = [replace(one, goals=Goals(tpot_s=goals_s[number % len(goals_s)])) for number, one in enumerate(requests)]
    return burst(MACHINE, recorder, requests), recorder


def longest_step_s(run: Run) -> float:
    """Return the device time of a run's longest step."""
    return max(MACHINE.line.time_s(plan) for _, plan in run.steps)
