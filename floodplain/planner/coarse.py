"""Places many unlike models: R_m is rounded down, so that units that differ little become alike.

Rounding down lowers or keeps every ``mem_s``, and changes no ``eq_s``. So the bound of the rounded problem is a bound
of the problem itself, and its placement is one whose objective is a little larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from floodplain.planner.classes import Counts, Problem, UnitClass, classify
from floodplain.planner.cluster import Model
from floodplain.planner.mixes import Integers, MixTable, list_mixes
from floodplain.planner.model import Answer, MixProgram
from floodplain.planner.solver import Deadline

FINEST = 64
"""The first step of rounding is this part of the largest R_m; it is doubled until the mixes are few enough."""


def place_coarsely(problem: Problem, deadline: Deadline, gap: float, max_mixes: int) -> Answer | None:
    """A placement and a bound by rounding; None if mixes stay more than ``max_mixes``, or time ends."""
    rounded = _round(problem, deadline, max_mixes)
    if rounded is None:
        return None
    coarse, table = rounded
    answer = MixProgram(coarse, table, deadline).minimise(gap)
    if answer.mixes is None:
        return answer
    return Answer(_tell_apart(problem, coarse, answer.mixes), answer.bound_bytes)


def _round(problem: Problem, deadline: Deadline, max_mixes: int) -> tuple[Problem, MixTable] | None:
    largest = max(abs(each.memory_bytes) for each in problem.classes)
    step = max(1, largest // FINEST)
    while step <= 2 * largest and not deadline.is_over:
        models = tuple(_round_down(model, step) for model in problem.cluster.models)
        coarse = classify(replace(problem.cluster, models=models))
        table = list_mixes(coarse, deadline, max_mixes)
        if table is not None:
            return coarse, table
        step *= 2
    return None


def _round_down(model: Model, step: int) -> Model:
    """The model with R_m a multiple of ``step``, or one byte: a producer stays one."""
    rounded = model.memory_bytes // step * step
    return replace(model, memory_bytes=max(1, rounded) if model.memory_bytes > 0 else rounded)


def _tell_apart(problem: Problem, coarse: Problem, mixes: Sequence[Counts]) -> tuple[Counts, ...]:
    """Assign the units of each rounded class: those with the most bytes first, each where it balances best."""
    class_of = {unit: place for place, each in enumerate(problem.classes) for unit in each.units}
    counts = np.zeros((len(mixes), len(problem.classes)), dtype=np.int64)
    surplus = np.zeros(len(mixes), dtype=np.int64)
    for column, alike in enumerate(coarse.classes):
        seats = np.array([mix[column] for mix in mixes], dtype=np.int64)
        units = sorted(alike.units, key=lambda unit: -abs(problem.classes[class_of[unit]].memory_bytes))
        for each, place in ((problem.classes[class_of[unit]], class_of[unit]) for unit in units):
            server = _choose(each, surplus, seats)
            seats[server] -= 1
            counts[server, place] += 1
            surplus[server] += each.num_gpus * each.memory_bytes
    return tuple(tuple(row) for row in counts.tolist())


def _choose(each: UnitClass, surplus: Integers, seats: Integers) -> int:
    """The server for a unit: for a producer the one with the least left over, for a consumer the most."""
    worst = np.iinfo(np.int64).max
    return int(np.argmin(np.where(seats > 0, each.sign * surplus, worst)))
