"""Covers all units by mixes: how many servers of each group hold each mix (Eq. 1-3), so that most bytes match."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from floodplain.core.errors import InvariantError
from floodplain.planner.classes import Counts, Problem
from floodplain.planner.mixes import Integers, MixTable
from floodplain.planner.solver import NOTHING_KNOWN, Deadline, Floats, Program, Solved, Status, solve

NARROW = (300, 300, 600, 600)
"""The number of mixes in each of the first tries: those that cost the least if servers may be divided."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Cover:
    """Mixes, and how often each is used.

    Attributes:
        table: Mixes.
        uses: Servers with each mix, [mix].
    """

    table: MixTable
    uses: Integers

    @property
    def matched_bytes(self) -> int:
        """Return the bytes that one-to-one pairs inside the servers match."""
        return int(self.uses @ self.table.matched_bytes)

    def mixes(self, problem: Problem) -> tuple[Counts, ...]:
        """Return the mix of each server of the cluster, in their order."""
        placed: dict[int, Counts] = {}
        left = [iter(group.servers) for group in problem.groups]
        for row in np.flatnonzero(self.uses).tolist():
            mix = tuple(self.table.counts[row].tolist())
            servers = left[int(self.table.group[row])]
            for _ in range(int(self.uses[row])):
                placed[next(servers)] = mix
        return tuple(placed[server] for server in range(len(problem.cluster.servers)))


class Coverer:
    """Finds covers by linear and integer programs.

    Args:
        problem: What is to be placed.
        deadline: When to stop.
    """

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self._deadline = deadline
        self._wanted = np.array(problem.num_units + tuple(len(group.servers) for group in problem.groups), dtype=float)

    def is_possible(self, table: MixTable) -> bool:
        """Whether these mixes cover the units if servers may be divided; True also if the time is over."""
        return len(table) > 0 and self._solve(table, np.zeros(len(table)), False).status is not Status.INFEASIBLE

    def relax(self, table: MixTable) -> Solved:
        """Solve with divided servers; the cost is the most bytes that are matched, in minus GB."""
        return self._solve(table, -table.matched_bytes / GB, False)

    def find(self, table: MixTable, relaxed: Solved) -> tuple[Status, Cover | None]:
        """Return a cover that matches many bytes; mixes that ``relaxed`` prefers are tried first.

        The status is OPTIMAL only if ``relaxed`` shows that no cover matches more.
        """
        cheapest = np.round(relaxed.reduced_costs, 6)
        for seed, width in enumerate(NARROW):
            if width >= len(table):
                break
            best_first = np.lexsort((np.random.default_rng(seed).random(len(table)), cheapest))
            narrow = table.where(best_first[:width])
            status, cover = self._pick(narrow, -narrow.matched_bytes / GB)
            if cover is not None:
                return status, cover
        status, cover = self._pick(table, -table.matched_bytes / GB)
        return status, cover

    def improve(self, table: MixTable, relaxed: Solved, than_bytes: int) -> tuple[Status, Cover | None]:
        """Return the cover that matches the most bytes; INFEASIBLE if none matches more than ``than_bytes``.

        A mix whose reduced cost exceeds the possible gain is in no such cover.
        """
        slack = -than_bytes / GB - relaxed.bound
        kept = table.where(relaxed.reduced_costs <= slack + 1e-6)
        status, cover = self._pick(kept, -kept.matched_bytes / GB)
        is_better = cover is not None and cover.matched_bytes > than_bytes
        return (status, cover) if is_better or not status.has_solution else (Status.INFEASIBLE, None)

    def _pick(self, table: MixTable, cost: Floats) -> tuple[Status, Cover | None]:
        solved = self._solve(table, cost, True)
        if not solved.status.has_solution:
            return solved.status, None
        cover = Cover(table, np.rint(solved.values).astype(np.int64))
        if not np.array_equal(_rows(table, len(self._wanted)) @ cover.uses, self._wanted):
            raise InvariantError("HiGHS returned a cover that does not hold")
        return solved.status, cover

    def _solve(self, table: MixTable, cost: Floats, is_integer: bool) -> Solved:
        if self._deadline.is_over:
            return NOTHING_KNOWN
        matrix = _rows(table, len(self._wanted))
        rows, columns = np.nonzero(matrix)
        program = Program(
            cost=cost,
            most=np.full(len(table), self._wanted.max()),
            rows=rows,
            columns=columns,
            values=matrix[rows, columns].astype(float),
            lower=self._wanted,
            upper=self._wanted,
            integer=np.full(len(table), is_integer),
        )
        return solve(program, self._deadline)


def _rows(table: MixTable, num_rows: int) -> Integers:
    """Return a row for each class, which counts its units, and for each group, which counts servers: [row, mix]."""
    num_classes = table.counts.shape[1]
    groups = np.arange(num_rows - num_classes)[:, None] == table.group[None, :]
    return np.vstack([table.counts.T, groups.astype(np.int64)])
