"""A placement by one pass over the units: the baseline, and what is left if the time ends before the solver does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from floodplain.planner.classes import Counts, Problem, UnitClass
from floodplain.planner.mixes import Integers

Flags = npt.NDArray[np.bool_]


def place_greedily(problem: Problem) -> tuple[Counts, ...] | None:
    """The mix of each server; None if some unit found no room.

    Large units come first, then those that may be on few servers, then producers, then consumers; of each kind those
    with the most bytes. Producers go where least is left over, consumers where most is.
    """
    servers = problem.cluster.servers
    free = np.array([server.num_gpus for server in servers], dtype=np.int64)
    gpu_bytes = np.array([server.memory_bytes for server in servers], dtype=np.int64)
    surplus = np.zeros(len(servers), dtype=np.int64)
    counts = np.zeros((len(servers), len(problem.classes)), dtype=np.int64)
    taken = np.zeros((len(servers), len(problem.cluster.apart)), dtype=bool)
    for place in sorted(range(len(problem.classes)), key=lambda place: _order(problem.classes[place], problem)):
        each = problem.classes[place]
        apart = sorted(each.apart)
        allowed = np.array([each.may_be_on(server) for server in servers])
        adds = each.num_gpus * (each.memory_bytes + each.sign * gpu_bytes)
        for _ in each.units:
            server = _choose(each, surplus, free, allowed & ~taken[:, apart].any(axis=1))
            if server is None:
                return None
            counts[server, place] += 1
            free[server] -= each.num_gpus
            surplus[server] += adds[server]
            taken[server, apart] = True
    return tuple(tuple(row) for row in counts.tolist())


def _order(each: UnitClass, problem: Problem) -> tuple[int, int, int, int]:
    num_allowed = sum(each.may_be_on(server) for server in problem.cluster.servers) if each.servers else 2**31
    return -each.num_gpus, num_allowed, -each.sign, -abs(each.memory_bytes)


def _choose(each: UnitClass, surplus: Integers, free: Integers, allowed: Flags) -> int | None:
    """The server for a unit: the first of the best."""
    possible = allowed & (free >= each.num_gpus)
    if not possible.any():
        return None
    if not each.sign:
        return int(np.argmax(np.where(possible, free, -1)))
    worst = np.iinfo(np.int64).max
    return int(np.argmin(np.where(possible, each.sign * surplus, worst)))
