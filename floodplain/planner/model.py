"""The integer program of AQUA's section 5, with one integer per mix and group of like servers.

Eq. 6 is minimised by trying pairs of caps, A for ``max mem_s`` (Eq. 4) and E for ``max G_s eq_s`` (Eq. 5), by the least
A + E first. The caps decide which mixes may be used; it remains to cover all units by mixes (Eq. 1-3). A relaxed
program with divided servers is solved before. Among optima the one that matches the most bytes is taken.

Signs: producers are positive, so ``mem_s`` is what is left over on a server, and ``t = 0`` for a model without any R_m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from floodplain.core.errors import InvariantError
from floodplain.planner.cluster import Counts, Problem
from floodplain.planner.mixes import Integers, MixTable
from floodplain.planner.solver import NOTHING_KNOWN, Deadline, Floats, Program, Solved, Status, solve


@dataclass(frozen=True, slots=True)
class Answer:
    """The result for a problem; without mixes if there is no placement, or none was found in time.

    No placement has a lower objective (Eq. 6) than the bound; None if there is no placement at all.
    ``is_most_matched``: it is proven that no placement with as good an objective matches more bytes.
    """

    mixes: tuple[Counts, ...] | None
    bound_bytes: int | None
    is_most_matched: bool = False


@dataclass(frozen=True, slots=True, order=True)
class _Caps:
    """A pair of caps to try. No placement whose G_s eq_s are at most E has an objective below ``value``, A + E.

    If it is sure, divided servers cover the units under these caps; else A is a guess from below.
    """

    value: int
    weighted: int
    is_sure: bool


class MixProgram:
    """Solves the program for one table of mixes; at the deadline with what is known."""

    def __init__(self, problem: Problem, table: MixTable, deadline: Deadline) -> None:
        self._problem, self._table = problem, table
        self._coverer = Coverer(problem, deadline)
        self._least_bytes, least_weighted = problem.least()
        levels: list[int] = np.unique(table.weighted_bytes).tolist()
        self._levels = [level for level in levels if level >= least_weighted]

    def minimise(self, gap: float = 0.0, most_bytes: int | None = None) -> Answer:
        """The placement that matches the most among those at most ``gap``, a part of the bound, above the bound.

        ``most_bytes`` is the objective of a known placement: a worse one is not good enough.
        """
        least = self._least_memory(self._levels[-1], self._least_bytes) if self._levels else None
        if least is None:
            return Answer(None, None)
        caps_to_try = [_Caps(least + level, level, False) for level in self._levels]
        heapify(caps_to_try)
        while caps_to_try:
            caps = heappop(caps_to_try)
            memory = caps.value - caps.weighted
            limit = caps.value + math.floor(gap * abs(caps.value))
            limit = limit if most_bytes is None else max(caps.value, min(limit, most_bytes))
            if caps.is_sure:
                status, cover = self._try(limit - caps.weighted, caps.weighted)
                if cover is not None:
                    return self._match_most(least, limit, caps.value, cover)
                if status is Status.UNKNOWN:
                    return Answer(None, caps.value)
                memory = limit - caps.weighted + 1
            follower = self._least_memory(caps.weighted, memory)
            if follower is not None:
                heappush(caps_to_try, _Caps(follower + caps.weighted, caps.weighted, True))
        return Answer(None, None)

    def _try(self, memory: int, weighted: int) -> tuple[Status, Cover | None]:
        table = self._within(memory, weighted)
        relaxed = self._coverer.relax(table)
        return self._coverer.find(table, relaxed) if relaxed.status.has_solution else (relaxed.status, None)

    def _least_memory(self, weighted: int, at_least: int) -> int | None:
        """The least A from ``at_least`` on with which divided servers cover the units under E; None if never."""
        possible = np.unique(self._table.memory_bytes[self._table.weighted_bytes <= weighted])
        possible = possible[possible >= at_least]
        first, step, last = 0, 1, len(possible) - 1
        while first <= last and not self._is_possible(int(possible[min(first + step, last)]), weighted):
            first, step = first + step + 1, 2 * step  # small tables are quick, so they come first
        if first > last:
            return None
        last = min(first + step, last)
        while first < last:
            middle = (first + last) // 2
            if self._is_possible(int(possible[middle]), weighted):
                last = middle
            else:
                first = middle + 1
        return int(possible[first])

    def _is_possible(self, memory: int, weighted: int) -> bool:
        return self._coverer.is_possible(self._within(memory, weighted))

    def _within(self, memory: int, weighted: int) -> MixTable:
        table = self._table
        return table.where((table.memory_bytes <= memory) & (table.weighted_bytes <= weighted))

    def _match_most(self, least: int, limit: int, bound: int, cover: Cover) -> Answer:
        """The cover with an objective up to ``limit`` that matches the most bytes."""
        rivals, is_most = self._rivals(least, limit)
        unit = int(np.gcd.reduce(self._table.matched_bytes))
        for table, relaxed in rivals:
            most = _floor(-relaxed.bound * GB, unit)
            if most <= cover.matched_bytes:
                break
            status, better = self._coverer.improve(table, relaxed, cover.matched_bytes)
            cover = better or cover
            is_most &= status in (Status.OPTIMAL, Status.INFEASIBLE)
        return Answer(cover.mixes(self._problem), bound, is_most)

    def _rivals(self, least: int, limit: int) -> tuple[Sequence[tuple[MixTable, Solved]], bool]:
        """The tables of all pairs of caps within ``limit``, best first, and whether these are all."""
        tables = [self._within(limit - level, level) for level in self._levels if least + level <= limit]
        relaxed = [(table, self._coverer.relax(table)) for table in tables if len(table)]
        solved = [(table, each) for table, each in relaxed if each.status.has_solution]
        are_all = all(each.status is not Status.UNKNOWN for _, each in relaxed)
        return sorted(solved, key=lambda pair: pair[1].bound), are_all


def _floor(value: float, unit: int) -> int:
    """The largest multiple of ``unit`` up to ``value``, with a tolerance for the solver's rounding."""
    return math.floor(value / max(unit, 1) + 1e-6) * unit


NARROW = (300, 300, 600, 600)
"""The number of mixes in each of the first tries: those that cost the least if servers may be divided."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Cover:
    """Mixes, and how many servers have each: [mix]."""

    table: MixTable
    uses: Integers

    @property
    def matched_bytes(self) -> int:
        """The bytes that one-to-one pairs inside the servers match."""
        return int(self.uses @ self.table.matched_bytes)

    def mixes(self, problem: Problem) -> tuple[Counts, ...]:
        """The mix of each server of the cluster, in their order."""
        placed: dict[int, Counts] = {}
        left = [iter(group.servers) for group in problem.groups]
        for row in np.flatnonzero(self.uses).tolist():
            mix = tuple(self.table.counts[row].tolist())
            servers = left[int(self.table.group[row])]
            for _ in range(int(self.uses[row])):
                placed[next(servers)] = mix
        return tuple(placed[server] for server in range(len(problem.cluster.servers)))


class Coverer:
    """Finds how many servers of each group hold each mix (Eq. 1-3), by linear and integer programs."""

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
        """A cover that matches many bytes; mixes that ``relaxed`` prefers are tried first.

        The status is OPTIMAL only if ``relaxed`` shows that no cover matches more.
        """
        cheapest = np.round(relaxed.reduced_costs, 6)
        for seed, width in enumerate(NARROW):
            if width >= len(table):
                break
            best_first = np.lexsort((np.random.default_rng(seed).random(len(table)), cheapest))
            narrow = table.where(best_first[:width])
            status, cover = self._pick(narrow)
            if cover is not None:
                return status, cover
        return self._pick(table)

    def improve(self, table: MixTable, relaxed: Solved, than_bytes: int) -> tuple[Status, Cover | None]:
        """The cover that matches the most bytes; INFEASIBLE if none matches more than ``than_bytes``.

        A mix whose reduced cost exceeds the possible gain is in no such cover.
        """
        slack = -than_bytes / GB - relaxed.bound
        status, cover = self._pick(table.where(relaxed.reduced_costs <= slack + 1e-6))
        is_better = cover is not None and cover.matched_bytes > than_bytes
        return (status, cover) if is_better or not status.has_solution else (Status.INFEASIBLE, None)

    def _pick(self, table: MixTable) -> tuple[Status, Cover | None]:
        solved = self._solve(table, -table.matched_bytes / GB, True)
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
    """A row for each class, which counts its units, and for each group, which counts servers: [row, mix]."""
    num_classes = table.counts.shape[1]
    groups = np.arange(num_rows - num_classes)[:, None] == table.group[None, :]
    return np.vstack([table.counts.T, groups.astype(np.int64)])
