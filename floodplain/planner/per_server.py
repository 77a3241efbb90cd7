"""The integer program of AQUA's section 5 with separate integers for each server: x[class, server].

It serves servers that hold too many mixes to list, and new placements of a running cluster, where servers that hold
different units are not alike. Instances of one class are one integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from floodplain.core.errors import InvariantError
from floodplain.planner.cluster import Counts, Problem
from floodplain.planner.layout import count_current
from floodplain.planner.model import GB, Answer
from floodplain.planner.solver import NOTHING_KNOWN, Deadline, Floats, Program, Solved, Status, solve

SLACK_BYTES = 2_000
"""What the solver's arithmetic may lose, in GB with tolerances of a millionth; smaller differences mean nothing."""


class PerServerProgram:
    """Minimises the objective, or the moves, server by server; at the deadline with what is known.

    Columns are x[class, server], then moves[class, server], then max mem_s and max G_s eq_s, in GB.
    """

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self._problem, self._deadline = problem, deadline
        self._num_classes, self._num_servers = len(problem.classes), len(problem.cluster.servers)
        self._size = self._num_classes * self._num_servers
        self._current = count_current(problem)
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._constrain()

    def minimise(self, gap: float, start: Sequence[Counts] | None) -> Answer:
        """Minimise Eq. 6; the solver chooses among optima."""
        cost = np.zeros(2 * self._size + 2)
        cost[-2:] = 1.0
        solved = self._solve(cost, gap, start)
        if solved.status is Status.INFEASIBLE:
            return Answer(None, None)
        mixes, bound = self._read(solved), sum(self._problem.least())
        if math.isfinite(solved.bound):
            bound = max(bound, math.ceil(solved.bound * GB - SLACK_BYTES))
        if mixes is not None and self._problem.objective(mixes) - bound <= 2 * SLACK_BYTES:
            bound = self._problem.objective(mixes)
        return Answer(mixes, bound)

    def fewest_moves(self, most_bytes: int, start: Sequence[Counts] | None) -> tuple[tuple[Counts, ...] | None, float]:
        """The mixes of least move cost with an objective up to ``most_bytes``, and a bound of that cost."""
        cost = np.zeros(2 * self._size + 2)
        for place, each in enumerate(self._problem.classes):
            cost[self._size + place * self._num_servers : self._size + (place + 1) * self._num_servers] = each.move_cost
        last = 2 * self._size
        self._add({last: 1.0, last + 1: 1.0}, -math.inf, most_bytes / GB)
        solved = self._solve(cost, 0.0, start)
        return self._read(solved), max(0.0, solved.bound)

    def cost_of(self, mixes: Sequence[Counts]) -> int:
        """The cost of the moves to a placement: of units that are on another server than now."""
        return sum(
            each.move_cost * max(0, self._current[server][place] - mix[place])
            for place, each in enumerate(self._problem.classes)
            for server, mix in enumerate(mixes)
        )

    def _constrain(self) -> None:
        problem, servers = self._problem, range(self._num_servers)
        for place, each in enumerate(problem.classes):
            if self._deadline.is_over:  # then nothing is solved
                return
            self._add({self._x(place, s): 1.0 for s in servers}, len(each.units), len(each.units))
        for s, server in enumerate(problem.cluster.servers):
            if self._deadline.is_over:
                return
            of_server = [(self._x(place, s), each) for place, each in enumerate(problem.classes)]
            self._add({x: each.num_gpus for x, each in of_server}, 0, server.num_gpus)
            surplus = {x: -each.num_gpus * each.memory_bytes / GB for x, each in of_server}
            self._add(surplus | {2 * self._size: 1.0}, 0, math.inf)
            weight = server.memory_bytes / GB
            balance = {x: -each.num_gpus * each.sign * weight for x, each in of_server}
            self._add(balance | {2 * self._size + 1: 1.0}, 0, math.inf)
            for names in range(len(problem.cluster.apart)):
                self._add({x: 1.0 for x, each in of_server if names in each.apart}, 0, 1)
            for x, _ in of_server:
                held = self._current[s][x // self._num_servers]
                if held:
                    self._add({x: 1.0, self._size + x: 1.0}, held, math.inf)

    def _add(self, row: dict[int, float], lower: float, upper: float) -> None:
        self._entries += [(len(self._lower), column, value) for column, value in row.items() if value]
        self._lower.append(lower)
        self._upper.append(upper)

    def _x(self, place: int, server: int) -> int:
        return place * self._num_servers + server

    def _solve(self, cost: Floats, gap: float, start: Sequence[Counts] | None) -> Solved:
        if self._deadline.is_over:
            return NOTHING_KNOWN
        rows, columns, values = zip(*self._entries, strict=True)
        ends = np.array([math.inf, math.inf])
        program = Program(
            cost=cost,
            most=np.concatenate([self._most(), np.full(self._size, math.inf), ends]),
            rows=np.array(rows),
            columns=np.array(columns),
            values=np.array(values, dtype=float),
            lower=np.array(self._lower),
            upper=np.array(self._upper),
            integer=np.arange(2 * self._size + 2) < self._size,
            least=np.concatenate([np.zeros(2 * self._size), -ends]),
        )
        return solve(program, self._deadline, gap, None if start is None else self._column_values(start))

    def _most(self) -> Floats:
        classes, servers = self._problem.classes, self._problem.cluster.servers
        return np.array(
            [min(len(c.units), s.num_gpus // c.num_gpus) if c.may_be_on(s) else 0 for c in classes for s in servers],
            dtype=float,
        )

    def _column_values(self, mixes: Sequence[Counts]) -> Floats:
        x = np.array(mixes, dtype=float).T
        moves = np.maximum(np.array(self._current, dtype=float).T - x, 0)
        ends = [most / GB for most in self._problem.maxima(mixes)]
        return np.concatenate([x.ravel(), moves.ravel(), ends])

    def _read(self, solved: Solved) -> tuple[Counts, ...] | None:
        if not solved.status.has_solution:
            return None
        x = np.rint(solved.values[: self._size]).astype(int).reshape(self._num_classes, self._num_servers)
        if tuple(x.sum(axis=1).tolist()) != self._problem.num_units:
            raise InvariantError("HiGHS returned a placement that does not hold")
        return tuple(tuple(mix) for mix in x.T.tolist())
