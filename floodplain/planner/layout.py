"""Assigns units to GPUs from the mixes of servers, so that as few units as possible move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from floodplain.planner.cluster import Counts, Problem, Server, Spot, Unit, UnitClass
from floodplain.planner.matching import Party
from floodplain.planner.solver import Deadline


def lay_out(problem: Problem, mixes: Sequence[Counts]) -> dict[Unit, Spot]:
    """The spot of every unit, by each server's ``mixes``. A unit whose server still holds its class keeps its GPUs."""
    held: dict[str, list[Unit]] = defaultdict(list)
    names = [server.name for server in problem.cluster.servers]
    for each, counts in zip(problem.classes, np.array(mixes, dtype=np.int64).T, strict=True):
        room = {names[server]: int(counts[server]) for server in np.flatnonzero(counts).tolist()}
        for unit, name in _seat(each, room, problem.cluster.current).items():
            held[name].append(unit)
    sizes = {unit: each.num_gpus for each in problem.classes for unit in each.units}
    spots: dict[Unit, Spot] = {}
    for server in problem.cluster.servers:
        spots |= _give_gpus(server, held[server.name], sizes, problem.cluster.current)
    return {unit: spots[unit] for unit, _ in problem.cluster.units()}


def parties(problem: Problem, spots: Mapping[Unit, Spot]) -> tuple[list[Party], list[Party]]:
    """The GPUs that lend and the GPUs that need memory."""
    servers = {server.name: server for server in problem.cluster.servers}
    memory = {unit: model.memory_bytes for unit, model in problem.cluster.units()}
    lend: list[Party] = []
    need: list[Party] = []
    for unit, spot in spots.items():
        server = servers[spot.server]
        for gpu in spot.gpus if memory[unit] else ():
            party = Party(server.device(gpu), server.name, server.domain, abs(memory[unit]), server.link)
            (lend if memory[unit] > 0 else need).append(party)
    return lend, need


def _seat(each: UnitClass, room: dict[str, int], current: Mapping[Unit, Spot]) -> dict[Unit, str]:
    seated: dict[Unit, str] = {}
    for unit in each.units:
        spot = current.get(unit)
        if spot is not None and room.get(spot.server, 0):
            room[spot.server] -= 1
            seated[unit] = spot.server
    seats = [server for server, count in room.items() for _ in range(count)]
    seated.update(zip((unit for unit in each.units if unit not in seated), seats, strict=True))
    return seated


def _give_gpus(
    server: Server, units: Sequence[Unit], sizes: Mapping[Unit, int], current: Mapping[Unit, Spot]
) -> dict[Unit, Spot]:
    stay = {unit: current[unit] for unit in units if unit in current and current[unit].server == server.name}
    taken = {gpu for spot in stay.values() for gpu in spot.gpus}
    free = [gpu for gpu in range(server.num_gpus) if gpu not in taken]
    spots = dict(stay)
    for unit in units:
        if unit not in spots:
            spots[unit] = Spot(server.name, tuple(free[: sizes[unit]]))
            del free[: sizes[unit]]
    return spots


def keep_in_place(problem: Problem, mixes: Sequence[Counts], deadline: Deadline) -> tuple[Counts, ...]:
    """Reassign the mixes within each group of servers so that few units move; servers choose one after the other.

    When the time is over, a server takes any mix.
    """
    now = count_current(problem)
    kept: dict[int, Counts] = {}
    for group in problem.groups:
        left = Counter(mixes[server] for server in group.servers)
        for server in sorted(group.servers, key=lambda server: -sum(now[server])):
            mix = next(iter(left)) if deadline.is_over else max(left, key=partial(_likeness, now=now[server]))
            kept[server] = mix
            left[mix] -= 1
            if not left[mix]:
                del left[mix]
    return tuple(kept[server] for server in range(len(mixes)))


def _likeness(mix: Counts, now: Sequence[int]) -> tuple[int, Counts]:
    return sum(map(min, mix, now)), mix


def count_current(problem: Problem) -> list[list[int]]:
    """The units of each class that are on each server now: [server][class]."""
    current = problem.cluster.current
    if not current:
        return [[0] * len(problem.classes)] * len(problem.cluster.servers)
    held = [Counter(current[unit].server for unit in each.units if unit in current) for each in problem.classes]
    return [[counts[server.name] for counts in held] for server in problem.cluster.servers]
