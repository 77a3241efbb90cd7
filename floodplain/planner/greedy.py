"""Places units in one pass: the baseline, and the result if the time ends before the solver has one."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

import numpy as np

from floodplain.planner.cluster import Counts, Problem, UnitClass

Kind = tuple[int, int, frozenset[str] | None, frozenset[int]]


def place_greedily(problem: Problem) -> tuple[Counts, ...] | None:
    """The mix of each server; None if a unit found no room.

    The order of units: large ones first, then those allowed on few servers, then producers before consumers, then those
    with the most bytes. Producers go where least is left over, consumers where most is. No deadline ends this pass,
    which is about linear in units and servers.
    """
    servers = _Servers(problem)
    for place in sorted(range(len(problem.classes)), key=lambda place: _order(problem, place)):
        if not all(servers.seat(place) for _ in problem.classes[place].units):
            return None
    return tuple(tuple(row) for row in servers.counts.tolist())


def _order(problem: Problem, place: int) -> tuple[int, float, int, int]:
    each = problem.classes[place]
    num_allowed = sum(len(group.servers) for group in problem.groups if group.allowed[place])
    return -each.num_gpus, num_allowed if each.servers else math.inf, -each.sign, -abs(each.memory_bytes)


class _Servers:
    """The units on each server; and for the kind of unit seated last the servers with room, the best first."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        servers = problem.cluster.servers
        self.counts = np.zeros((len(servers), len(problem.classes)), dtype=np.int64)
        self._free = [server.num_gpus for server in servers]
        self._surplus = [0] * len(servers)
        self._taken: list[frozenset[int]] = [frozenset()] * len(servers)
        self._kind: Kind | None = None
        self._best_first: list[tuple[int, int]] = []

    def seat(self, place: int) -> bool:
        """Place a unit of a class on the best server; False if no server has room."""
        each = self._problem.classes[place]
        self._turn_to(each)
        if not self._best_first:
            return False
        _, server = heappop(self._best_first)
        gpu_bytes = self._problem.cluster.servers[server].memory_bytes
        self.counts[server, place] += 1
        self._free[server] -= each.num_gpus
        self._surplus[server] += each.num_gpus * (each.memory_bytes + each.sign * gpu_bytes)
        self._taken[server] |= each.apart
        if self._has_room(server, each):
            heappush(self._best_first, (self._cost(server, each), server))
        return True

    def _turn_to(self, each: UnitClass) -> None:
        kind = (each.sign, each.num_gpus, each.servers, each.apart)
        if kind != self._kind:
            servers = enumerate(self._problem.cluster.servers)
            allowed = [place for place, server in servers if each.may_be_on(server) and self._has_room(place, each)]
            self._kind, self._best_first = kind, [(self._cost(place, each), place) for place in allowed]
            heapify(self._best_first)

    def _has_room(self, server: int, each: UnitClass) -> bool:
        return self._free[server] >= each.num_gpus and not self._taken[server] & each.apart

    def _cost(self, server: int, each: UnitClass) -> int:
        return each.sign * self._surplus[server] if each.sign else -self._free[server]
