"""``fair`` before the first turn, in bursts of every size and shape.

No later arrival begins first. Each request that begins earlier has one turn, so a first turn comes within a bound of
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView, View
from floodplain.policy.ranking import live_rows
from tests.support.bursts import Recorder, Run, entries
from tests.support.examples import examples
from tests.support.shapes import LONG, SHAPES, SHARING_SHAPES, Shape, count_between, work_of


def newcomers_that_passed(run: Run) -> Iterator[int]:
    """Yield for every request how many later arrivals began before it."""
    lives = list(run.lifecycles.values())
    for number, one in enumerate(lives):
        first_s = entries(one)[0]
        yield sum(entries(later)[0] < first_s for later in lives[number + 1 :])


@pytest.mark.slow
def test_no_later_arrival_begins_first() -> None:
    """The least work is at most a waiting request's, so newcomers are lifted to that and rank behind it.

    This holds for all priorities: they are weights.
    """
    num_seen = 0

    @settings(max_examples=examples(10))
    @given(SHAPES, st.sampled_from([(0,), (0, 1, -1), (20, -20)]))
    def law(shape: Shape, priorities: tuple[int, ...]) -> None:
        nonlocal num_seen
        numbers = list(newcomers_that_passed(replace(shape, priorities=priorities).run("fair")[0]))
        assert not any(numbers)
        num_seen += len(numbers)

    law()
    assert num_seen > 200


@pytest.mark.slow
def test_nor_where_prompts_begin_alike() -> None:
    """Except requests that need blocks from swap space: if another request loads these, they wait for them."""
    num_seen = 0

    @settings(max_examples=examples(6))
    @given(SHARING_SHAPES)
    def law(shape: Shape) -> None:
        nonlocal num_seen
        run, recorder = shape.run("fair")
        need_a_copy = {row.seq_id for view, _, _ in recorder.seen for row in view.waiting if row.next_copy is not None}
        for seq_id, number in zip(run.lifecycles, newcomers_that_passed(run), strict=True):
            assert not number or seq_id in need_a_copy
            num_seen += seq_id not in need_a_copy

    law()
    assert num_seen > 100


@pytest.mark.slow
def test_under_cfs_some_do() -> None:
    shape = Shape(num_requests=50, interval_ms=10, num_prompt=11, max_tokens=24, block_tokens=16, slice_steps=4)
    assert sum(newcomers_that_passed(shape.run("cfs")[0])) > 30
    assert not any(newcomers_that_passed(shape.run("fair")[0]))


@pytest.mark.slow
def test_nor_in_a_line_that_is_longer_than_a_view_shows() -> None:
    """Control: under ``paced`` a priority is a place in line."""
    shape = replace(LONG, num_requests=150, priorities=(1, 0, 0))
    assert not any(newcomers_that_passed(shape.run("fair")[0]))
    assert sum(newcomers_that_passed(shape.run("paced")[0])) > 1000


@dataclass(frozen=True)
class Wait:
    """Steps until the first turn of a request that found no room, and the bound on them."""

    num_steps: int
    bound: int


def waits(shape: Shape, run: Run, recorder: Recorder) -> Iterator[Wait]:
    """Yield a wait for every request, from the first decision that shows it waiting."""
    busy = [when for when, plan in run.steps if plan.num_tokens]
    seen: set[SeqId] = set()
    for view, now, _ in recorder.seen:
        for row in view.waiting:
            if row.seq_id not in seen:
                seen.add(row.seq_id)
                num_steps = count_between(busy, now, entries(run.lifecycles[row.seq_id])[0])
                yield Wait(num_steps, first_turn_bound(shape, view, row))


def first_turn_bound(shape: Shape, view: View, row: SequenceView) -> int:
    """Return the bound: a slice that has just begun, the turns of requests ahead side by side, and their prompts.

    A turn lasts a slice, and one more while several must leave for one, and a step for each of two copies. The pool
    holds as many side by side as fit, less the largest request's blocks: the next one waits for all of its own at
    once. Prompts get as many tokens of a step as take half of its time, at the least of the shortest step.
    """
    machine, turn = shape.machine, shape.slice_steps + 2
    ahead = [other for other in live_rows(view) if work_of(other, view) <= row.credit and other.seq_id != row.seq_id]
    ahead = [other for other in ahead if work_of(other, view) < row.credit or other.order_key < row.order_key]
    fresh = [other for other in ahead if other.num_generated(view.step) <= 0]
    num_blocks = sum(-(-(other.num_tokens + 2 * turn) // machine.block_tokens) for other in (*ahead, row))
    largest = -(-(shape.num_prompt + shape.max_tokens) // machine.block_tokens)
    num_rounds = -(-num_blocks // (machine.num_blocks - largest))
    tokens_per_step = int(machine.line.base_s / machine.line.prefill_token_s)
    num_prompt_steps = -(-shape.num_prompt * (len(fresh) + 1) // tokens_per_step)
    return turn + num_rounds * (shape.slice_steps + turn) + num_prompt_steps


@pytest.mark.slow
def test_the_first_turn_comes_after_one_turn_of_requests_ahead() -> None:
    num_seen = 0

    @settings(max_examples=examples(10))
    @given(SHAPES)
    def law(shape: Shape) -> None:
        nonlocal num_seen
        for wait in waits(shape, *shape.run("fair")):
            assert wait.num_steps <= wait.bound
            num_seen += wait.num_steps > 0

    law()
    assert num_seen > 100


@pytest.mark.slow
def test_under_fcfs_the_first_turn_waits_until_requests_ahead_finish() -> None:
    """Control: FCFS. ``cfs`` is none, because it also ranks requests without served work first."""
    assert any(wait.num_steps > 2 * wait.bound for wait in waits(LONG, *LONG.run("fcfs")))
