"""Fits the parameters of a step's time to measured steps: non-negative least squares. Pure.

Errors are relative, so that a decode of a few tokens counts as much as a long prompt. A stalled step is far from every
fit: such rows get less weight, and are dropped at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import typing as npt

from floodplain.core.errors import UserError
from floodplain.core.quantiles import quantile
from floodplain.cost.step_time import PARTS, StepCost, StepWork

FloatArray = npt.NDArray[np.float64]

NUM_FOLDS = 5
_NUM_REWEIGHTS = 30
_NEAR, _FAR = 2.0, 6.0
"""In robust standard deviations: residuals beyond the first get less weight, rows beyond the second are dropped."""
_TO_DEVIATION = 1.4826
"""The standard deviation of normal residuals over the median of their absolute values."""
_EXACT = 1e-9
"""A relative error that counts as zero: the deviation of rows without noise."""
_SETTLED = 1e-3
_SINGULAR = 1e-9
_SHARE = 0.05
"""Least share in an undetermined direction for a part to be named in the error."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured step: its work and its seconds."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """Parameters fitted to all rows, and their errors on steps that they were not fitted to.

    Errors are relative: median and 95th percentile, each row predicted by a fit to the other folds. ``num_outliers``
    are rows that the fit to all rows dropped.
    """

    cost: StepCost
    median_error: float
    p95_error: float
    num_outliers: int


def fit_steps(rows: Sequence[StepRow], parts: Sequence[str] = PARTS, seed: int = 0) -> StepFit:
    """Fit the ``parts`` of a step's time to measured steps; other parts cost nothing. ``seed`` is that of the folds.

    UserError if the rows are too few, hold a time that is not positive, or leave a part undetermined.
    """
    amounts, seconds = _arrays(rows, parts)
    _check(amounts, seconds, parts)
    values, is_far = _fit_robust(amounts, seconds)
    errors = _held_out_errors(amounts, seconds, np.random.default_rng(seed))
    return StepFit(
        cost=StepCost(**dict(zip(parts, values.tolist(), strict=True))),
        median_error=float(np.median(errors)),
        p95_error=quantile(errors.tolist(), 0.95),
        num_outliers=int(is_far.sum()),
    )


def nonnegative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 with the least |matrix x - target|, for full column rank (Lawson and Hanson's active set)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = matrix / scale
    x = np.zeros(matrix.shape[1])
    is_free = np.zeros(len(x), dtype=bool)
    least = 1e-12 * float(np.linalg.norm(target))
    for _ in range(3 * len(x) + 10):  # each round frees a column for good, up to rounding
        gradient = np.where(is_free, -np.inf, scaled.T @ (target - scaled @ x))
        if is_free.all() or gradient.max() <= least:
            break
        is_free[int(gradient.argmax())] = True
        x, is_free = _step_to_best(scaled, target, x, is_free)
    return x / scale


def _step_to_best(
    matrix: FloatArray, target: FloatArray, x: FloatArray, is_free: npt.NDArray[np.bool_]
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Move towards the least squares of the free columns; a column that reaches 0 is fixed."""
    while True:
        best = np.zeros_like(x)
        best[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
        is_blocked = is_free & (best <= 0)
        if not is_blocked.any():
            return best, is_free
        way = (x[is_blocked] / (x[is_blocked] - best[is_blocked])).min()
        x = x + way * (best - x)
        is_free = is_free & (x > 1e-15 * max(1.0, float(x.max())))
        x = np.where(is_free, x, 0.0)


def _arrays(rows: Sequence[StepRow], parts: Sequence[str]) -> tuple[FloatArray, FloatArray]:
    columns = [PARTS.index(name) for name in parts]
    amounts = np.array([row.work.amounts for row in rows], dtype=np.float64).reshape(len(rows), len(PARTS))
    return amounts[:, columns], np.array([row.seconds for row in rows], dtype=np.float64)


def _check(amounts: FloatArray, seconds: FloatArray, parts: Sequence[str]) -> None:
    least = 2 * len(parts)
    if len(seconds) < least:
        raise UserError(f"{len(seconds)} steps are too few for {len(parts)} parameters: measure at least {least}")
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise UserError("every measured step must take a positive time")
    unused = [name for name, column in zip(parts, amounts.T, strict=True) if not column.any()]
    if unused:
        raise UserError(f"the steps say nothing of {_listed(unused)}: measure steps that have such work")
    scaled = amounts / np.linalg.norm(amounts, axis=0)
    _, sizes, directions = np.linalg.svd(scaled, full_matrices=False)
    if sizes[-1] <= _SINGULAR * sizes[0]:
        mixed = [name for name, share in zip(parts, directions[-1], strict=True) if abs(share) > _SHARE]
        raise UserError(f"the steps do not tell {_listed(mixed)} apart: measure steps in which their ratio differs")


def _fit_robust(amounts: FloatArray, seconds: FloatArray) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """(parameters, outlier rows): Huber weights until they settle, then least squares of the other rows."""
    matrix, ones = amounts / seconds[:, None], np.ones(len(seconds))
    weights = ones
    for _ in range(_NUM_REWEIGHTS):
        root = np.sqrt(weights)
        values = nonnegative_least_squares(matrix * root[:, None], root)
        residuals = np.abs(matrix @ values - 1)
        deviation = max(_TO_DEVIATION * float(np.median(residuals)), _EXACT)
        before, weights = weights, np.minimum(1.0, _NEAR * deviation / np.maximum(residuals, _EXACT))
        if np.abs(weights - before).max() < _SETTLED:
            break
    is_far = residuals > _FAR * deviation
    if is_far.any() and (~is_far).sum() >= len(values):
        values = nonnegative_least_squares(matrix[~is_far], ones[~is_far])
    return values, is_far


def _held_out_errors(amounts: FloatArray, seconds: FloatArray, rng: np.random.Generator) -> FloatArray:
    folds = rng.permutation(len(seconds)) % NUM_FOLDS
    errors = np.empty(len(seconds))
    for fold in range(NUM_FOLDS):
        is_held = folds == fold
        values, _ = _fit_robust(amounts[~is_held], seconds[~is_held])
        errors[is_held] = np.abs(amounts[is_held] @ values / seconds[is_held] - 1)
    return errors


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
