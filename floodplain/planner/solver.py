"""Solves linear and integer programs by HiGHS, and returns what is known when the time is over."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


class Status(Enum):
    """What is known about the solution of a program."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    """There is a solution, and perhaps a better one: the time was over, or the gap small enough."""
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """The time was over before there was a solution."""

    @property
    def has_solution(self) -> bool:
        """Whether there are values."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, slots=True)
class Program:
    """Minimise ``cost @ x`` where ``lower <= A x <= upper`` and ``least <= x <= most``.

    ``rows``, ``columns`` and ``values`` are the entries of A. ``integer``: whether each x is a whole number. Bounds of
    x and costs are [column], bounds of A x are [row]; ``least`` None: 0.
    """

    cost: Floats
    most: Floats
    rows: Places
    columns: Places
    values: Floats
    lower: Floats
    upper: Floats
    integer: npt.NDArray[np.bool_]
    least: Floats | None = None


@dataclass(frozen=True, slots=True)
class Solved:
    """The result of a program; without a solution only ``bound`` is valid.

    No x has a lower cost than ``bound``; minus infinity if nothing is known. Reduced costs are the least that a unit of
    each x adds to the cost, if all x may be fractions.
    """

    status: Status
    values: Floats
    bound: float
    reduced_costs: Floats


NOTHING_KNOWN = Solved(Status.UNKNOWN, np.zeros(0), -math.inf, np.zeros(0))
"""The result of a program for which there was no time."""


class Deadline:
    """When work must end: so many seconds from now, on a monotonic clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._seconds = seconds

    @property
    def left_s(self) -> float:
        """The seconds that are left; 0 if it is over."""
        return max(0.0, self._seconds - self.spent_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return not self.left_s

    def within(self, seconds: float) -> Deadline:
        """A deadline for a part of the work: in ``seconds``, but not after this one."""
        return Deadline(min(seconds, self.left_s), self._clock)

    @property
    def spent_s(self) -> float:
        """The seconds since it was set."""
        return self._clock() - self._began_s


def solve(program: Program, deadline: Deadline, gap: float = 0.0, start: Floats | None = None) -> Solved:
    """Solve a program until the deadline, from ``start`` if there is a solution to begin with.

    A solution is good enough if its cost is above the bound by at most ``gap``, a part of it.
    """
    import highspy

    if deadline.is_over:
        return NOTHING_KNOWN
    _print_banner_nowhere()
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.silent()
    options = {"time_limit": deadline.left_s, "mip_rel_gap": gap, "threads": 1, "random_seed": 0}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_model_of(program))
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = start
        highs.setSolution(solution)
    highs.run()
    return _read(highs, is_integer=bool(program.integer.any()))


@cache
def _print_banner_nowhere() -> None:
    """Make the first solver of this process, which prints a banner on standard output whatever its options are."""
    import highspy

    try:
        sys.stdout.flush()
        stdout = os.dup(1)
    except OSError:  # standard output is closed: nothing is printed anyway
        return
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
    try:
        highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _model_of(program: Program) -> Any:
    import highspy

    order = np.lexsort((program.rows, program.columns))
    num_columns, num_rows = len(program.cost), len(program.lower)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_, model.col_upper_ = program.cost, program.most
    model.col_lower_ = np.zeros(num_columns) if program.least is None else program.least
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(program.columns[order], np.arange(num_columns + 1)).astype(np.int32)
    model.a_matrix_.index_ = program.rows[order].astype(np.int32)
    model.a_matrix_.value_ = program.values[order]
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    if program.integer.any():
        model.integrality_ = [kinds[int(is_integer)] for is_integer in program.integer]
    return model


def _read(highs: Any, *, is_integer: bool) -> Solved:
    import highspy

    status, info, solution = highs.getModelStatus(), highs.getInfo(), highs.getSolution()
    values, reduced = np.array(solution.col_value), np.array(solution.col_dual)
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solved(Status.INFEASIBLE, values, math.inf, reduced)
    bound = info.mip_dual_bound if is_integer else info.objective_function_value
    if status == highspy.HighsModelStatus.kOptimal:
        return Solved(Status.OPTIMAL, values, bound, reduced)
    bound = bound if is_integer else -math.inf
    is_feasible = is_integer and info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Solved(Status.FEASIBLE if is_feasible else Status.UNKNOWN, values, bound, reduced)
