"""The time of a step as a sum of named parts, and the work of plans."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.plan import PrefillChunk, StepPlan
from floodplain.core.request import SeqId
from floodplain.cost.fit import StepRow, fit_steps
from floodplain.cost.step_time import LINE_PARTS, PARTS, StepCost, StepTimer, StepWork, read_cost
from floodplain.policy.registry import POLICIES, make_policy
from tests.support.bursts import LINE, Machine, begin, make_burst
from tests.support.examples import examples

A, B = SeqId(0), SeqId(1)
COST = StepCost(
    base_s=0.01, decode_s=0.002, context_token_s=1e-5, chunk_s=0.001, prefill_token_s=1e-4, self_pair_s=1e-7,
    prefix_token_s=3e-5, prefix_pair_s=2e-7,
)  # fmt: skip


def chunk(seq_id: SeqId, start: int, num_tokens: int) -> PrefillChunk:
    return PrefillChunk(seq_id, start, tuple(range(num_tokens)), samples=True)


def test_a_step_is_the_sum_of_its_named_parts() -> None:
    work = StepWork.of([100, 300], [(0, 10), (50, 4)])
    assert COST.parts_s(work) == {
        "base_s": 0.01,
        "decode_s": pytest.approx(0.004),
        "context_token_s": pytest.approx(400e-5),
        "chunk_s": pytest.approx(0.002),
        "prefill_token_s": pytest.approx(14e-4),
        "self_pair_s": pytest.approx((55 + 10) * 1e-7),
        "prefix_token_s": pytest.approx(50 * 3e-5),
        "prefix_pair_s": pytest.approx(200 * 2e-7),
    }
    assert COST.time_s(work) == pytest.approx(sum(COST.parts_s(work).values()))


def test_a_step_that_computes_nothing_takes_no_time() -> None:
    assert COST.time_s(StepWork()) == 0.0
    assert StepTimer(COST).time_s(StepPlan(0)) == 0.0


lengths = st.integers(2, 500)


@given(prefix=st.integers(0, 500), first=lengths, second=lengths)
@settings(max_examples=examples(50))
def test_two_chunks_of_a_prompt_cost_one_more_step_and_chunk_only(prefix: int, first: int, second: int) -> None:
    """If both kinds of pairs cost the same: a prompt has the same pairs however it is cut (Eq. 1)."""
    cost = StepCost(base_s=0.01, chunk_s=0.003, prefill_token_s=1e-4, self_pair_s=1e-7, prefix_pair_s=1e-7)
    whole = cost.time_s(StepWork.of([], [(prefix, first + second)]))
    parts = [cost.time_s(StepWork.of([], [piece])) for piece in ((prefix, first), (prefix + first, second))]
    assert sum(parts) == pytest.approx(whole + 0.013)


@given(prefix=st.integers(1, 500), tokens=lengths)
@settings(max_examples=examples(30))
def test_a_later_chunk_of_as_many_tokens_takes_longer(prefix: int, tokens: int) -> None:
    """KunServe, figure 9: token counts do not show this."""
    assert COST.time_s(StepWork.of([], [(prefix, tokens)])) > COST.time_s(StepWork.of([], [(0, tokens)]))


@given(batches=st.lists(st.tuples(st.lists(st.integers(1, 900), min_size=1), st.lists(st.tuples(lengths, lengths)))))
@settings(max_examples=examples(30))
def test_a_batch_costs_its_members_less_what_they_load_together(
    batches: list[tuple[list[int], list[tuple[int, int]]]],
) -> None:
    """Eq. 3: parameters are loaded once."""
    contexts = [context for batch, _ in batches for context in batch]
    chunks = [piece for _, batch in batches for piece in batch]
    apart = sum(COST.time_s(StepWork.of(*batch)) for batch in batches)
    together = COST.time_s(StepWork.of(contexts, chunks))
    assert together == pytest.approx(apart - max(0, len(batches) - 1) * COST.base_s)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_contexts_follow_from_the_plans_before() -> None:
    timer = StepTimer(COST)
    assert timer.read(StepPlan(0, prefills=(chunk(A, 0, 30),))) == ([], [(0, 30)])
    assert timer.read(StepPlan(1, (A,), (chunk(B, 16, 8),))) == ([31], [(16, 8)])
    assert timer.read(StepPlan(2, (A, B))) == ([32, 25], [])


def test_one_that_comes_back_with_one_token_is_a_decode_with_its_context() -> None:
    timer = StepTimer(COST)
    assert timer.read(StepPlan(0, prefills=(chunk(A, 41, 1),))) == ([42], [])
    assert timer.read(StepPlan(1, (A,))) == ([43], [])


def test_a_decode_out_of_nothing_is_refused() -> None:
    timer = StepTimer(COST)
    timer.read(StepPlan(0, prefills=(chunk(A, 0, 4),)))
    with pytest.raises(InvariantError, match="decodes a sequence"):
        timer.read(StepPlan(1, (A,), released=(A,)))


@pytest.mark.parametrize("policy", POLICIES)
def test_contexts_are_right_whatever_is_preempted(policy: str) -> None:
    """Counted independently: the context of a decode is all tokens of its sequence."""
    requests, machine = make_burst(40, interval_s=0.005, num_prompt=12, max_tokens=40), Machine(num_slots=60)
    timer, seen = StepTimer(COST), []

    run = begin(machine, make_policy(policy), requests)
    state = run.loop.state

    def look(plan: StepPlan, now: float) -> None:
        singles = [piece.seq_id for piece in plan.prefills if len(piece.token_ids) == 1]
        contexts = sum(len(state.sequences[seq_id].tokens) for seq_id in (*plan.decodes, *singles))
        seen.append((sum(timer.read(plan)[0]), contexts))

    run.instance.on_step = look
    run.environment.run()
    assert seen
    assert all(measured == counted for measured, counted in seen)
    assert sum(run.counters.preemptions.values()) > 0


def test_with_the_parts_of_a_line_it_is_that_line() -> None:
    assert {name for name in PARTS if hasattr(LINE, name)} == set(LINE_PARTS)
    timer = StepTimer(read_cost({name: getattr(LINE, name) for name in LINE_PARTS}))
    run = begin(Machine(), make_policy("paced"), make_burst(40, interval_s=0.005), step_time_s=timer.time_s)
    run.environment.run()
    line = begin(Machine(), make_policy("paced"), make_burst(40, interval_s=0.005))
    line.environment.run()
    assert run.elapsed_s == pytest.approx(line.elapsed_s)


LINE_OF = {"base_s": 0.5, "decode_s": 0.25, "prefill_token_s": 0.125}


def test_a_profile_is_read_by_its_parts_or_else_by_its_line() -> None:
    assert read_cost(LINE_OF) == StepCost(**LINE_OF)
    assert read_cost({**LINE_OF, "parts": {"base_s": 1, "chunk_s": 2.0}}) == StepCost(base_s=1.0, chunk_s=2.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None])
def test_a_part_that_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="self_pair_s of a step must be a number"):
        read_cost({**LINE_OF, "parts": {"self_pair_s": value}})


# -- the fit on published timings --------------------------------------------------------------------------------------


@pytest.fixture
def attention(shared_dir: Path) -> list[StepRow]:
    """Prefill attention of one layer with 40 query and 8 KV heads on an A100."""
    with (shared_dir / "data/hardware/aic_attention_prefill.csv").open(newline="") as file:
        return [
            StepRow(StepWork.of([], [(0, int(row["prompt_len"]))] * int(row["batch_size"])), float(row["lat_us"]) / 1e6)
            for row in csv.DictReader(file)
            if (row["gpu"], row["q_heads"], row["kv_heads"]) == ("a100", "40", "8")
        ]


def test_pairs_of_a_prompt_predict_its_attention_within_five_per_cent(attention: list[StepRow]) -> None:
    assert fit_steps(attention, ("base_s", "prefill_token_s", "self_pair_s")).median_error < 0.05


def test_token_counts_alone_are_far_off(attention: list[StepRow]) -> None:
    """KunServe, Figure 15: up to 48 % without attention."""
    assert fit_steps(attention, ("base_s", "prefill_token_s")).p95_error > 0.48
