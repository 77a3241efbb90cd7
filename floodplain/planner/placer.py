"""Makes a placement of a cluster: the optimum, or the best found in time, then pairs inside each domain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.planner.classes import Counts, Problem, classify
from floodplain.planner.cluster import Cluster, Spot, Unit
from floodplain.planner.coarse import place_coarsely
from floodplain.planner.explain import explain
from floodplain.planner.greedy import place_greedily
from floodplain.planner.layout import keep_in_place, lay_out, parties
from floodplain.planner.matching import Pair, match
from floodplain.planner.mixes import MAX_MIXES, list_mixes
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
