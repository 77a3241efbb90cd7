"""Makes a placement of a cluster: the optimum, or the best found in time, then pairs inside each domain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from floodplain.core.errors import UserError
from floodplain.planner.cluster import Cluster, Counts, Model, Problem, Spot, Unit, UnitClass, classify
from floodplain.planner.explain import explain
from floodplain.planner.greedy import place_greedily
from floodplain.planner.layout import keep_in_place, lay_out, parties
from floodplain.planner.matching import Pair, match
from floodplain.planner.mixes import MAX_MIXES, Integers, MixTable, list_mixes
from floodplain.planner.model import Answer, MixProgram
from floodplain.planner.per_server import SLACK_BYTES, PerServerProgram
from floodplain.planner.solver import Deadline

DEFAULT_TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement, and what is proven of it.

    No placement has a lower objective (Eq. 6) than ``bound_bytes``. ``num_moves`` counts units on other GPUs than now;
    ``is_least_moved``: no placement of the allowed quality has cheaper moves; ``is_most_matched``: none with as good an
    objective matches more bytes inside servers. ``method`` is the program: ``mixes``, ``servers`` or ``greedy``.
    """

    spots: Mapping[Unit, Spot]
    pairs: tuple[Pair, ...]
    objective_bytes: int
    bound_bytes: int
    num_moves: int
    is_least_moved: bool
    is_most_matched: bool
    method: str
    seconds: float

    @property
    def gap(self) -> float:
        """How far the objective is above the bound, as a part of the larger one; 0 if proven optimal."""
        scale = max(abs(self.objective_bytes), abs(self.bound_bytes))
        return (self.objective_bytes - self.bound_bytes) / scale if scale else 0.0


@dataclass(frozen=True, slots=True)
class _Best:
    mixes: tuple[Counts, ...]
    bound_bytes: int
    method: str
    is_most_matched: bool = False
    is_least_moved: bool = True


def place(
    cluster: Cluster,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    gap: float = 0.0,
    max_mixes: int = MAX_MIXES,
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """The best placement of a cluster's models; after the time limit the best so far, with its gap.

    It is good enough if its objective is above the bound by at most ``gap``, a part of it. With more than ``max_mixes``
    the program for each server is used. Raises UserError if there is no placement, and the message says why, or none
    was found in time.
    """
    deadline = Deadline(time_limit_s, clock)
    problem = classify(cluster)
    best = _find_best(problem, deadline, gap, max_mixes)
    if cluster.current:
        best = _move_little(problem, best, deadline)
    spots = lay_out(problem, best.mixes)
    lend, need = parties(problem, spots)
    return Placement(
        spots,
        match(lend, need, cluster.consumers_per_producer),
        problem.objective(best.mixes),
        best.bound_bytes,
        sum(spots[unit] != spot for unit, spot in cluster.current.items() if unit in spots),
        best.is_least_moved,
        best.is_most_matched,
        best.method,
        deadline.spent_s,
    )


def _find_best(problem: Problem, deadline: Deadline, gap: float, max_mixes: int) -> _Best:
    greedy = place_greedily(problem)
    table = list_mixes(problem, deadline, max_mixes) if problem.num_free_gpus >= 0 else None
    if problem.num_free_gpus < 0:
        answer, method = Answer(None, None), ""
    elif table is not None:
        most = None if greedy is None else problem.objective(greedy)
        answer, method = MixProgram(problem, table, deadline).minimise(gap, most), "mixes"
    else:
        answer, method = _place_unlike(problem, deadline, gap, max_mixes, greedy), "servers"
    if answer.bound_bytes is None:
        raise UserError(explain(problem.cluster, deadline))
    if answer.mixes is not None:
        return _Best(answer.mixes, answer.bound_bytes, method, answer.is_most_matched)
    if greedy is None:
        raise UserError(f"no placement was found within {deadline.spent_s:.3g} s: give a longer --time-limit")
    return _Best(greedy, answer.bound_bytes, "greedy")


def _place_unlike(
    problem: Problem, deadline: Deadline, gap: float, max_mixes: int, greedy: tuple[Counts, ...] | None
) -> Answer:
    """Solve a problem with too many mixes by the program for each server, from the best start there is."""
    coarse = place_coarsely(problem, deadline, gap, max_mixes)
    if coarse is None:
        coarse = Answer(None, sum(problem.least()))
    if coarse.bound_bytes is None:
        return coarse
    start = min((mixes for mixes in (coarse.mixes, greedy) if mixes is not None), key=problem.objective, default=None)
    if start is not None and problem.objective(start) - coarse.bound_bytes <= gap * abs(coarse.bound_bytes):
        return Answer(start, coarse.bound_bytes)
    answer = PerServerProgram(problem, deadline).minimise(gap, start)
    if answer.bound_bytes is None:
        return answer
    mixes, bound = answer.mixes or start, max(answer.bound_bytes, coarse.bound_bytes)
    return Answer(mixes, bound if mixes is None else min(bound, problem.objective(mixes)))


def _move_little(problem: Problem, best: _Best, deadline: Deadline) -> _Best:
    """The placement with the cheapest moves of those that are nearly as good as the best one."""
    objective = problem.objective(best.mixes)
    most = objective + math.floor(problem.cluster.within * abs(objective))
    program = PerServerProgram(problem, deadline)
    start = keep_in_place(problem, best.mixes, deadline)
    found, bound = program.fewest_moves(most, start)
    candidates = [mixes for mixes in (found,) if mixes is not None and problem.objective(mixes) <= most + SLACK_BYTES]
    mixes = min([start, *candidates], key=program.cost_of)
    is_least = program.cost_of(mixes) <= math.ceil(bound - 1e-6)
    return _Best(mixes, best.bound_bytes, best.method, False, is_least)


FINEST = 64
"""The first step of rounding is this part of the largest R_m; it is doubled until the mixes are few enough."""


def place_coarsely(problem: Problem, deadline: Deadline, gap: float, max_mixes: int) -> Answer | None:
    """A placement and a bound with R_m rounded down; None if mixes stay more than ``max_mixes``, or time ends.

    Rounding down raises no ``mem_s`` and changes no ``eq_s``: the bound holds for the problem itself.
    """
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
