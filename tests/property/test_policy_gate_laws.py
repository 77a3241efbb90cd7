"""While all requests fit, policies with turns plan exactly as FCFS; FCFS behind the gate preempts no request.

The test states "fits" independently, step by step, over plain numbers.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.view import SequenceView, View
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.gate import GatedPolicy
from floodplain.policy.growth import blocks_due, count_spare_blocks
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, burst, make_burst
from tests.support.examples import examples
from tests.support.turns import Teller, make_story
from tests.support.views import NEVER, loading, make_view, prompt, stream, swapped, waiting

SHARING = ["cfs", "fair", "paced", "timely"]


def grown(view: View, row: SequenceView, num_steps: int) -> int:
    """Return the blocks that a running sequence takes in the next steps, one step after the other."""
    if not row.is_decoding:
        return max(0, -(-(row.num_tokens + num_steps) // view.block_tokens) - row.num_blocks)
    num_blocks, due = 0, row.block_due_step
    for step in range(view.step, view.step + num_steps):
        if step < row.end_step and step >= due:
            num_blocks += 1
            due += view.block_tokens
    return num_blocks


def fits(view: View, num_steps: int) -> bool:
    if view.swapped or view.num_waiting != len(view.waiting):
        return False
    num_blocks = sum(grown(view, row, num_steps) for row in [*view.running, *view.loading])
    num_blocks += sum(grown(view, row, num_steps) - row.num_shared_blocks for row in view.waiting)
    num_places = view.max_num_seqs - len(view.running) - len(view.loading) - len(view.waiting)
    return num_blocks <= view.num_available_blocks and num_places >= 0


STREAMS = st.builds(
    lambda due, end: {"block_due_step": due, "end_step": end},
    st.integers(100, 120),
    st.one_of(st.just(NEVER), st.integers(100, 120)),
)


@settings(max_examples=examples(60))
@given(
    STREAMS,
    st.integers(1, 30),
    st.integers(1, 6),
)
def test_growth_is_what_counting_gives(fields: dict[str, object], num_steps: int, block_tokens: int) -> None:
    view = make_view(block_tokens=block_tokens)
    row = stream(0, **fields)
    assert blocks_due(view, row, num_steps) == grown(view, row, num_steps)


@settings(max_examples=examples(60))
@given(
    streams=st.lists(STREAMS, max_size=5),
    prompts=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 1)), max_size=3),
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), max_size=4),
    num_available=st.integers(0, 40),
    slice_steps=st.integers(1, 12),
    num_hidden=st.sampled_from([0, 0, 0, 1]),
    is_swapped=st.sampled_from([False, False, False, True]),
    num_loading=st.integers(0, 2),
    max_num_seqs=st.sampled_from([3, 6, 64, 64]),
)
def test_the_gate_is_closed_exactly_while_all_requests_fit(
    streams: list[dict[str, object]],
    prompts: list[tuple[int, int]],
    others: list[tuple[int, int]],
    num_available: int,
    slice_steps: int,
    num_hidden: int,
    is_swapped: bool,
    num_loading: int,
    max_num_seqs: int,
) -> None:
    rows = [stream(number, **fields) for number, fields in enumerate(streams)]
    rows += [prompt(10 + n, tokens, tokens // 2) for n, (tokens, _) in enumerate(prompts)]
    rows += [waiting(20 + n, tokens, num_shared_blocks=shared) for n, (tokens, shared) in enumerate(others)]
    rows += [swapped(30)] * is_swapped
    rows += [loading(40 + n) for n in range(num_loading)]
    view = make_view(
        *rows,
        num_available_blocks=num_available,
        num_waiting=len(others) + num_hidden,
        max_num_seqs=max_num_seqs,
    )
    assert (count_spare_blocks(view, slice_steps) >= 0) == fits(view, slice_steps)
    for name in SHARING:
        decision = make_policy(name, SharingSettings(slice_steps=slice_steps)).decide(view, 200.0, Random(0))
        if fits(view, slice_steps):
            assert decision == FcfsPolicy().decide(view, 200.0, Random(0))
            assert not decision.preemptions


@settings(max_examples=examples(5))
@given(st.integers(0, 2**32), st.sampled_from(SHARING))
def test_in_random_stories_too(seed: int, name: str) -> None:
    story = make_story(seed, name, max_requests=10)
    recorder = Recorder(make_policy(name, story.settings))
    Teller(story, recorder).tell()
    for view, now, decision in recorder.seen:
        if fits(view, story.settings.slice_steps):
            assert replace(decision, prefix_backup=None) == FcfsPolicy().decide(view, now, Random(0))
            assert not decision.preemptions


@pytest.mark.parametrize("name", SHARING)
def test_with_no_pressure_a_whole_run_has_the_same_plans(name: str) -> None:
    machine = Machine(num_blocks=400)
    requests = make_burst(30, interval_s=0.02, num_prompt=30, num_shared=8)
    ours, theirs = (burst(machine, make_policy(policy), requests) for policy in (name, "fcfs"))
    assert ours.steps == theirs.steps
    assert ours.counters == theirs.counters


def test_under_pressure_it_has_not() -> None:
    requests = make_burst(30, interval_s=0.02, num_prompt=30, num_shared=8)
    fcfs, *others = (burst(Machine(), make_policy(policy), requests).steps for policy in ("fcfs", *SHARING))
    assert all(steps != fcfs for steps in others)


# -- negative controls -----------------------------------------------------------------------------------------------


def test_a_gate_that_opens_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FCFS then preempts: the law above does not hold."""
    monkeypatch.setattr("floodplain.policy.gate.count_spare_blocks", lambda view, slice_steps: -len(view.swapped))
    recorder = Recorder(make_policy("paced"))
    assert isinstance(recorder.inner, GatedPolicy)
    burst(Machine(num_slots=4000), recorder, make_burst(20, interval_s=0.01))
    assert any(d.preemptions for view, _, d in recorder.seen if not view.swapped and not view.loading)
