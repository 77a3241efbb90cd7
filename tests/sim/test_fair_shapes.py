"""``fair`` in bursts of every size and shape that exceed their machine.

Before the first turn: no later arrival begins first, and each request that begins earlier has one turn, so a first turn
comes within a bound of steps.

Between two turns of a request: a victim with D more work than another request ranks behind it until that one has
caught up, in turns worth a slice of s tokens: D // s + 1 of them, beside those for its prompt (one, unless a slice is
too short for the prompts that are computed in it). That is two only if no victim is two slices or more above another
request, as in ``test_fair_turns.py``: some are, where one admission needs several victims, or a request waited before
the gate opened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.request import Request, SeqId
from floodplain.core.view import SequenceView, View
from floodplain.policy.ranking import live_rows
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, Run, burst, entries, exits, make_burst
from tests.support.examples import examples

POOL_TOKENS = 320


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a burst that exceeds its machine."""

    num_requests: int
    interval_ms: int
    num_prompt: int
    max_tokens: int
    block_tokens: int
    slice_steps: int
    priorities: tuple[int, ...] = (0,)
    """Priorities of consecutive requests, repeated."""

    num_shared: int = 0
    """Length of the common prefix of all prompts. Without one, no block stays cached."""

    @property
    def machine(self) -> Machine:
        return Machine(
            num_blocks=POOL_TOKENS // self.block_tokens,
            block_tokens=self.block_tokens,
            num_slots=20_000,
            block_s=3e-6 * self.block_tokens,
            max_num_seqs=256,
            max_batched_tokens=256,
            caches_prefixes=self.num_shared > 0,
        )

    @property
    def turn_tokens(self) -> int:
        """The least tokens of a turn.

        A stream whose blocks are all still on the device resumes without a copy, in a step that computes nothing of it;
        its slice begins in that step: one token less.
        """
        return self.slice_steps - (self.num_shared > 0)

    def requests(self) -> list[Request]:
        requests = make_burst(
            self.num_requests,
            interval_s=self.interval_ms / 1e3,
            num_prompt=self.num_prompt,
            max_tokens=self.max_tokens,
            num_shared=self.num_shared,
        )
        priorities = cycle(self.priorities)
        return [replace(one, priority=next(priorities)) for one in requests]

    def run(self, policy: str) -> tuple[Run, Recorder]:
        recorder = Recorder(make_policy(policy, SharingSettings(slice_steps=self.slice_steps)))
        return burst(self.machine, recorder, self.requests()), recorder


SHAPES = st.builds(
    Shape,
    num_requests=st.integers(20, 50),
    interval_ms=st.sampled_from([0, 2, 10, 20]),
    num_prompt=st.integers(8, 48),
    max_tokens=st.integers(16, 60),
    block_tokens=st.sampled_from([4, 8, 16]),
    slice_steps=st.integers(2, 8),
)

SHARING_SHAPES = st.builds(
    Shape,
    num_requests=st.integers(30, 50),
    interval_ms=st.sampled_from([0, 2, 10]),
    num_prompt=st.integers(20, 48),
    max_tokens=st.integers(24, 60),
    block_tokens=st.sampled_from([4, 8, 16]),
    slice_steps=st.integers(2, 8),
    num_shared=st.sampled_from([8, 16]),
)
"""Prompts with a common prefix, which is stored once: the other tokens alone must exceed the pool."""


def work_of(row: SequenceView, view: View) -> float:
    """Return the work of a request: its credit, plus the tokens it generated."""
    return row.credit + max(0, row.num_generated(view.step))


def count_between(times: list[float], begin_s: float, end_s: float) -> int:
    """Return how many of these times are in the interval, its beginning included."""
    return max(0, bisect_left(times, end_s) - bisect_left(times, begin_s))


LONG = Shape(num_requests=36, interval_ms=0, num_prompt=24, max_tokens=44, block_tokens=16, slice_steps=3)
"""A burst in which the controls fail."""


# -- the turns of others between two turns of a request ----------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """The turns of one request between two turns of another one, and its lag when the other one left.

    Attributes:
        num_prompt_turns: Those that began before its first token.
        was_there: It was live when the other one left; else it arrived before that was back.
    """

    num_turns: int
    num_prompt_turns: int
    lag: float
    was_there: bool

    def exceeds(self, turn_tokens: int) -> bool:
        return self.num_turns - self.num_prompt_turns > max(0, self.lag) // turn_tokens + 1


def losses(run: Run, recorder: Recorder) -> Iterator[Loss]:
    """Yield losses of every request, for each other one live at its exit or arriving before its return."""
    views = {now: view for view, now, decision in recorder.seen if decision.preemptions}
    credits = {row.seq_id: row.credit for view, _, _ in recorder.seen for row in view.waiting}
    begins = {seq_id: entries(one) for seq_id, one in run.lifecycles.items()}
    for seq_id, one in run.lifecycles.items():
        for left_s in exits(one):
            back_s = next(when for when in begins[seq_id] if when > left_s)
            works = {row.seq_id: work_of(row, views[left_s]) for row in live_rows(views[left_s])}
            for other, life in run.lifecycles.items():
                was_there = other in works
                if other != seq_id and (was_there or left_s < life.arrival_s < back_s):
                    num_turns = count_between(begins[other], left_s, back_s)
                    num_prompt_turns = count_between(begins[other], left_s, min(back_s, life.token_times_s[0]))
                    lag = works[seq_id] - (works[other] if was_there else credits.get(other, works[seq_id]))
                    yield Loss(num_turns, num_prompt_turns, lag, was_there)


@pytest.mark.slow
def test_between_two_turns_other_requests_catch_up_and_no_more() -> None:
    seen: Counter[tuple[bool, bool]] = Counter()

    @settings(max_examples=examples(10))
    @given(SHAPES | SHARING_SHAPES)
    def law(shape: Shape) -> None:
        for loss in losses(*shape.run("fair")):
            assert not loss.exceeds(shape.turn_tokens)
            seen[loss.was_there, loss.num_turns > 0] += 1

    law()
    assert seen[True, True] > 5_000
    assert seen[False, True] > 100


@pytest.mark.slow
def test_under_cfs_others_exceed_the_bound_between_two_turns() -> None:
    """Control: under ``cfs`` every slice ranks without regard to earlier turns."""
    assert sum(loss.exceeds(LONG.slice_steps) for loss in losses(*LONG.run("cfs"))) > 100
    assert not any(loss.exceeds(LONG.slice_steps) for loss in losses(*LONG.run("fair")))


EARLY = Shape(num_requests=48, interval_ms=10, num_prompt=19, max_tokens=20, block_tokens=4, slice_steps=2)


@pytest.mark.slow
def test_two_turns_are_what_most_take_but_no_bound() -> None:
    """Some victims have several slices more than another request, which then catches up."""
    there = [loss for loss in losses(*EARLY.run("fair")) if loss.was_there]
    more = [loss for loss in there if loss.num_turns > 2]
    assert 0 < len(more) < 0.02 * len(there)
    assert all(loss.lag >= 2 * EARLY.slice_steps or loss.num_prompt_turns for loss in more)


# -- before the first turn ---------------------------------------------------------------------------------------------


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
