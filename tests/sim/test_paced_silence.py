"""``paced`` under overload, in virtual time: bounds on a stream's silence for any goals of other requests."""

from __future__ import annotations

import math

import pytest

from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.paced import OVERDUE, divide
from floodplain.policy.settings import SharingSettings
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

LARGEST = -(-(NUM_PROMPT + MAX_TOKENS) // MACHINE.block_tokens)
"""Blocks of a request at its end."""


def silence_bound_s(factor: float, step_s: float) -> float:
    """Return ``max_gap_s``, plus one more cycle of turns for arrivals before the first silence of that length.

    A stream is silent for ``max_gap_s`` before newcomers are stopped, and in that time some arrive. Each adds one turn
    of a slice to the cycle, on two blocks (its prompt and its first block of tokens), in the rotation's part without
    what remains if turns do not fill it. At last the turn itself must begin: copies out and in, a step each, and a
    slice that has just begun.
    """
    settings = SharingSettings()
    part = settings.rotation_share * MACHINE.num_blocks - (LARGEST + 1)
    turn_s = settings.slice_steps * step_s
    num_arrived = factor * CAPACITY * MAX_GAP_S
    return MAX_GAP_S + num_arrived * 2 / part * turn_s + turn_s + 2 * step_s


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_requests"), [(2, 200), (3, 400)])
def test_silence_is_at_most_the_gap_and_one_more_cycle(factor: float, num_requests: int) -> None:
    run, _ = overload(factor, num_requests, MAX_GAP_S)
    assert run.max_gap_s > MAX_GAP_S  # it is an overload
    assert run.max_gap_s <= silence_bound_s(factor, longest_step_s(run))
    assert run.counters.preemptions["recompute"] == 0


@pytest.mark.slow
def test_without_the_crowding_rule_silence_grows_while_the_overload_lasts() -> None:
    """Control: over the bound at half of the requests, and longer, over three times the bound, at all of them."""
    bound_s = silence_bound_s(3, longest_step_s(overload(3, 400, UNCROWDED)[0]))
    half_s, whole_s = (overload(3, number, UNCROWDED)[0].max_gap_s for number in (200, 400))
    assert bound_s < half_s < whole_s
    assert whole_s > 3 * bound_s


GREEDY, MODEST = 1e-9, 1e9
"""Extreme goals: no request needs them."""


@pytest.mark.slow
@pytest.mark.parametrize("num_modest", [1, 3])
def test_goals_of_others_make_no_silence_longer(num_modest: int) -> None:
    run, _ = overload(3, 400, MAX_GAP_S, goals_s=(GREEDY,) + num_modest * (MODEST,))
    assert MAX_GAP_S < run.max_gap_s <= silence_bound_s(3, longest_step_s(run))


@pytest.mark.slow
def test_cfs_silences_the_old_ones_too() -> None:
    assert overload(3, 150, MAX_GAP_S, "cfs")[0].max_gap_s > silence_bound_s(3, 0.03)


def rotating_streams_of(view: View, now: float) -> list[SequenceView]:
    rows = (*view.running, *view.loading, *view.swapped)
    streams = sorted((row for row in rows if row.num_generated(view.step)), key=lambda row: row.order_key)
    settings = SharingSettings(max_gap_s=MAX_GAP_S)
    return list(divide(view, streams, now, settings).rotating)


@pytest.mark.slow
def test_of_the_overdue_the_longest_silence_ends_first() -> None:
    """While an overdue stream waits, no stream with a shorter silence gets a turn."""
    num_turns = 0
    for view, now, decision in overload(2, 300, MAX_GAP_S)[1].seen:
        limit_s = now - OVERDUE * MAX_GAP_S
        came = {order.seq_id for order in decision.resumptions}
        absent = [row for row in rotating_streams_of(view, now) if row.status is Status.SWAPPED]
        waits = [row.last_token_s or 0.0 for row in absent if row.seq_id not in came and not row.is_leaving]
        overdue = [last_s for last_s in waits if last_s < limit_s]
        resumed = [row.last_token_s or 0.0 for row in absent if row.seq_id in came]
        assert max(resumed, default=0.0) <= min(overdue, default=math.inf)
        num_turns += bool(overdue) and len(resumed)
    assert num_turns > 30
