"""``paced`` where something other than blocks is scarce: places on the device, room for a long context, slots.

In virtual time, at twice the rate that the machine can serve. ``tests/sim/test_paced_silence.py`` has the plain case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import pytest

from floodplain.core.plan import Reason
from floodplain.core.request import Request
from floodplain.policy import paced
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, Run, burst, make_burst
from tests.support.loops import make_request
from tests.support.overload import CAPACITY, MACHINE, MAX_GAP_S, MAX_TOKENS, NUM_PROMPT

pytestmark = pytest.mark.slow
SETTINGS = SharingSettings(max_gap_s=MAX_GAP_S)


def serve(
    machine: Machine, requests: Sequence[Request], name: str = "paced", settings: SharingSettings = SETTINGS
) -> tuple[Run, set[Reason | None]]:
    """Return the run, and the reasons of its decisions."""
    recorder = Recorder(make_policy(name, settings))
    run = burst(machine, recorder, requests)
    return run, {decision.reason for _, _, decision in recorder.seen}


def doubled(rate: float) -> list[Request]:
    return make_burst(150, interval_s=1 / (2 * rate), num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS)


# -- places ----------------------------------------------------------------------------------------------------------

SEATS = replace(MACHINE, num_blocks=1000, max_num_seqs=8)
SEATS_CAPACITY = 10.4
"""Eight requests at a time, 64 steps of 12 ms each."""


def seats_bound_s() -> float:
    """As in test_paced_silence.py: each arrival while the first silence grows adds a turn to the rotation."""
    step_s = SEATS.line.base_s + SEATS.line.decode_s * 8 + SEATS.line.prefill_token_s * NUM_PROMPT * 2
    turn_s = SETTINGS.slice_steps * step_s
    num_arrived = 2 * SEATS_CAPACITY * MAX_GAP_S
    return MAX_GAP_S + num_arrived / (SETTINGS.rotation_share * SEATS.max_num_seqs) * turn_s + turn_s + 2 * step_s


def test_where_places_are_scarce_silence_is_bounded_too() -> None:
    run, reasons = serve(SEATS, doubled(SEATS_CAPACITY))
    assert MAX_GAP_S < run.max_gap_s <= seats_bound_s()
    assert Reason.CROWDED in reasons


def test_a_policy_that_divides_blocks_alone_lets_streams_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: all streams are core, none rotates, and each newcomer takes the place of the youngest stream."""
    split_at = paced._split_at
    monkeypatch.setattr(
        paced, "_split_at", lambda view, rows, num_blocks, num_seats: split_at(view, rows, num_blocks, 999)
    )
    assert serve(SEATS, doubled(SEATS_CAPACITY))[0].max_gap_s > 3 * seats_bound_s()


# -- a long context --------------------------------------------------------------------------------------------------

LONG = 3
"""The fourth request: 900 tokens, 57 blocks of 100, beside three that hold 20 to 47 each until they end."""


def beside_a_long_one() -> list[Request]:
    shapes = [(160, 600, 0.01 * number) for number in range(3)] + [(900, 100, 0.2)]
    shapes += [(80, 32, 0.5 + 0.25 * number) for number in range(20)]
    return [
        make_request(
            f"r{number}",
            tuple(range(10_000 * number, 10_000 * number + num_prompt)),
            arrival_s,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for number, (num_prompt, max_tokens, arrival_s) in enumerate(shapes)
    ]


def serve_a_long_one() -> tuple[float, float]:
    """Return (the long stream's longest silence, the longest TTFT). No goal can be kept, so the core is large."""
    settings = replace(SETTINGS, tpot_goal_s=1e-3)
    run, _ = serve(replace(MACHINE, max_model_len=1200), beside_a_long_one(), settings=settings)
    return max(list(run.lifecycles.values())[LONG].itl_s), run.max_ttft_s


def test_a_stream_larger_than_the_rotation_gets_turns_and_blocks_none() -> None:
    silence_s, wait_s = serve_a_long_one()
    assert silence_s < MAX_GAP_S
    assert wait_s < MAX_GAP_S / 2


def test_a_core_that_never_shrinks_stops_it_and_all_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "_let_in", lambda view, first, core, num_steps: (core, []))
    silence_s, wait_s = serve_a_long_one()
    assert silence_s > 2 * MAX_GAP_S
    assert wait_s > MAX_GAP_S


# -- slots -----------------------------------------------------------------------------------------------------------


def waits_s(run: Run) -> list[float]:
    return [one.token_times_s[0] - one.arrival_s for one in run.lifecycles.values()]


def longest_life_s(run: Run) -> float:
    return max(one.token_times_s[-1] - one.arrival_s for one in run.lifecycles.values())


@cache
def serve_in_line() -> Run:
    return serve(replace(MACHINE, num_slots=0), doubled(CAPACITY), "fcfs")[0]


@pytest.mark.parametrize("pools", [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
def test_little_swap_space_is_never_worse_than_waiting_in_line(pools: float) -> None:
    num_slots = int(pools * MACHINE.num_blocks)
    run, reasons = serve(replace(MACHINE, num_slots=num_slots), doubled(CAPACITY))
    line = serve_in_line()
    assert median(waits_s(run)) < median(waits_s(line))
    assert run.max_ttft_s < 1.1 * line.max_ttft_s
    assert longest_life_s(run) < longest_life_s(line)
    assert run.counters.preemptions["recompute"] < line.counters.preemptions["recompute"] / 2
    assert (Reason.SWAP_FULL in reasons) is (pools < 4)


def test_the_more_swap_space_the_sooner_the_first_tokens() -> None:
    medians = [
        median(waits_s(serve(replace(MACHINE, num_slots=num_slots), doubled(CAPACITY))[0]))
        for num_slots in (25, 50, 100, 200)
    ]
    assert medians == sorted(medians, reverse=True)
    assert medians[-1] < 0.1 < medians[0]
