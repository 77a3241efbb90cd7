"""Parameters of a step's time from measured steps: recovered exactly, nearly, in spite of stalls, or refused."""

from __future__ import annotations

from itertools import chain, combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.cost.fit import StepRow, fit_steps, nonnegative_least_squares
from floodplain.cost.step_time import LINE_PARTS, PARTS, StepCost, StepWork
from tests.support.examples import examples

SCALES = {
    "base_s": 1e-2, "decode_s": 1e-3, "context_token_s": 1e-6, "chunk_s": 1e-3, "prefill_token_s": 1e-4,
    "self_pair_s": 1e-7, "prefix_token_s": 1e-5, "prefix_pair_s": 1e-7,
}  # fmt: skip
"""Approximate costs of a small model on a CPU."""

seeds = st.integers(0, 2**32 - 1)


def works(dice: Random, count: int = 60) -> list[StepWork]:
    """Batches of decodes, of chunks, and of both, with contexts of many lengths."""

    def draw() -> StepWork:
        contexts = [dice.randint(1, 4000)] * dice.choice([0, 1, 8, 64])
        chunks = [(dice.choice([0, 100, 3000]), dice.randint(2, 900)) for _ in range(dice.choice([0, 1, 3]))]
        return StepWork.of(contexts or [] if chunks else [10], chunks)

    return [draw() for _ in range(count)]


costs = st.fixed_dictionaries(
    {name: st.floats(0.1, 10).map(lambda factor, scale=scale: factor * scale) for name, scale in SCALES.items()}
).map(lambda parts: StepCost(**parts))


@given(cost=costs, seed=seeds)
@settings(max_examples=examples(12), deadline=None)
def test_parameters_of_steps_without_noise_are_recovered_exactly(cost: StepCost, seed: int) -> None:
    fit = fit_steps([StepRow(work, cost.time_s(work)) for work in works(Random(seed))])
    for name in PARTS:
        assert getattr(fit.cost, name) == pytest.approx(getattr(cost, name), rel=1e-5)
    assert (fit.p95_error, fit.num_outliers) == (pytest.approx(0, abs=1e-6), 0)


@given(cost=costs, seed=seeds, noise=st.floats(0.001, 0.03))
@settings(max_examples=examples(12), deadline=None)
def test_errors_on_held_out_steps_are_about_the_noise(cost: StepCost, seed: int, noise: float) -> None:
    dice = Random(seed)
    rows = [StepRow(work, cost.time_s(work) * (1 + dice.gauss(0, noise))) for work in works(dice, 120)]
    fit = fit_steps(rows)
    assert 0.4 * noise < fit.median_error < 1.1 * noise  # the median of a normal deviation is 0.67
    assert fit.median_error < fit.p95_error < 3.5 * noise


@given(cost=costs, seed=seeds)
@settings(max_examples=examples(12), deadline=None)
def test_stalled_steps_change_nothing_and_are_counted(cost: StepCost, seed: int) -> None:
    dice = Random(seed)
    rows = [StepRow(work, cost.time_s(work)) for work in works(dice, 120)]
    stalled = [StepRow(row.work, row.seconds * dice.uniform(3, 20)) for row in rows[:12]]
    fit = fit_steps([*rows[12:], *stalled])
    assert fit.num_outliers == 12
    assert [getattr(fit.cost, name) for name in PARTS] == pytest.approx(
        [getattr(cost, name) for name in PARTS], rel=1e-4
    )
    assert fit.p95_error > 0.5  # a stall among the held-out steps cannot be predicted


def test_no_part_is_negative() -> None:
    """Negative control: plain least squares gives a decode a negative time."""
    rows = [StepRow(StepWork.of([1] * count, []), 0.02 - 0.001 * count) for count in (1, 2, 3, 4, 5, 6) * 2]
    fit = fit_steps(rows, ("base_s", "decode_s"))
    assert fit.cost.decode_s == 0
    assert 0.013 < fit.cost.base_s < 0.02
    assert np.polyfit([row.work.num_decodes for row in rows], [row.seconds for row in rows], 1)[0] < 0


def test_a_line_leaves_attention_out() -> None:
    cost = StepCost(base_s=0.01, decode_s=0.001, prefill_token_s=1e-4)
    fit = fit_steps([StepRow(work, cost.time_s(work)) for work in works(Random(1))], LINE_PARTS)
    assert fit.cost.self_pair_s == fit.cost.prefix_pair_s == fit.cost.context_token_s == fit.cost.chunk_s == 0
    assert fit.cost.prefill_token_s == pytest.approx(1e-4)


@given(seed=seeds)
@settings(max_examples=examples(5), deadline=None)
def test_the_order_of_rows_does_not_matter_to_the_fit(seed: int) -> None:
    dice, cost = Random(seed), StepCost(**SCALES)
    rows = [StepRow(work, cost.time_s(work) * dice.uniform(0.9, 1.1)) for work in works(dice)]
    mixed = dice.sample(rows, len(rows))
    one, other = (fit_steps(order, seed=seed).cost for order in (rows, mixed))
    assert [getattr(one, name) for name in PARTS] == pytest.approx(
        [getattr(other, name) for name in PARTS], rel=1e-6, abs=1e-12
    )


# -- refused ---------------------------------------------------------------------------------------------------------


def decodes_of(*counts: int, context: int = 100) -> list[StepRow]:
    return [StepRow(StepWork.of([context] * count, []), 0.01 + 0.001 * count) for count in counts]


@pytest.mark.parametrize(
    ("rows", "parts", "message"),
    [
        (decodes_of(1, 2, 3), LINE_PARTS, "3 steps are too few for 3 parameters: measure at least 6"),
        (decodes_of(*range(1, 9)), LINE_PARTS, "say nothing of prefill_token_s: measure"),
        (decodes_of(*[4] * 9), ("base_s", "decode_s"), "do not tell base_s and decode_s apart"),
        (
            decodes_of(*range(1, 9)),
            ("base_s", "decode_s", "context_token_s"),
            "tell decode_s and context_token_s apart",
        ),
        ([StepRow(StepWork.of([1], []), 0.0)] * 9, ("base_s",), "must take a positive time"),
        ([StepRow(StepWork.of([1], []), float("nan"))] * 9, ("base_s",), "must take a positive time"),
    ],
)
def test_rows_that_cannot_determine_the_parts_are_refused_in_one_line(
    rows: list[StepRow], parts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        fit_steps(rows, parts)
    assert "\n" not in str(refused.value)


# -- the solver, against all subsets of columns ----------------------------------------------------------------------


def best_of_all_subsets(matrix: np.ndarray, target: np.ndarray) -> float:
    """The least squared distance that any set of columns reaches without a negative coefficient."""
    columns = range(matrix.shape[1])
    found = [float(target @ target)]
    for chosen in chain.from_iterable(combinations(columns, count) for count in range(1, len(columns) + 1)):
        x = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        if (x >= 0).all():
            found.append(float(((matrix[:, chosen] @ x - target) ** 2).sum()))
    return min(found)


@given(seed=st.integers(0, 2**32 - 1), num_columns=st.integers(1, 5), num_rows=st.integers(6, 12))
@settings(max_examples=examples(60), deadline=None)
def test_no_set_of_columns_is_nearer_to_the_target(seed: int, num_columns: int, num_rows: int) -> None:
    dice = np.random.default_rng(seed)
    matrix, target = dice.normal(size=(num_rows, num_columns)), dice.normal(size=num_rows)
    matrix *= 10.0 ** dice.integers(-6, 6, size=num_columns)
    x = nonnegative_least_squares(matrix, target)
    assert (x >= 0).all()
    assert ((matrix @ x - target) ** 2).sum() == pytest.approx(best_of_all_subsets(matrix, target), rel=1e-6)
