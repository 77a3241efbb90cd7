"""``fair`` in bursts of every size and shape: the turns of others between two turns of a request.

A victim with D more work than another request ranks behind it until that one has caught up, in turns worth a slice of
s tokens: D // s + 1 of them, beside those for its prompt (one, unless a slice is too short for the prompts that are
computed in it). That is two only if no victim is two slices or more above another request, as in
``test_fair_turns.py``: some are, where one admission needs several victims, or a request waited before the gate opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from floodplain.policy.ranking import live_rows
from tests.support.bursts import Recorder, Run, entries, exits
from tests.support.examples import examples
from tests.support.shapes import LONG, SHAPES, SHARING_SHAPES, Shape, count_between, work_of


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
