"""Small clusters by Hypothesis, and all their placements by enumeration: an oracle without the product's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from hypothesis import strategies as st

from floodplain.planner.cluster import Cluster, Model, Server, Unit

GB = 10**9
MEMORY = st.sampled_from([-30, -20, -7, 0, 5, 15, 25]).map(lambda gb: gb * GB)


@st.composite
def clusters(draw: st.DrawFn, *, max_units: int = 6) -> Cluster:
    """Draw up to three servers and ``max_units`` units."""
    kinds = draw(st.lists(st.sampled_from([(2, 80), (4, 80), (4, 80), (3, 40)]), min_size=1, max_size=3))
    domains = draw(st.sampled_from(["own", "one"]))
    servers = tuple(
        Server(f"s{i}", gpus, gb * GB, f"s{i}" if domains == "own" else "rack", draw(st.sampled_from([0, 450])) * GB)
        for i, (gpus, gb) in enumerate(kinds)
    )
    names = [server.name for server in servers]
    models: list[Model] = []
    left = min(max_units, sum(server.num_gpus for server in servers))
    for i in range(draw(st.integers(1, 4))):
        count, shards, stages = (
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 1, 2])),
            draw(st.sampled_from([1, 1, 2])),
        )
        pins = draw(st.none() | st.sets(st.sampled_from(names), min_size=1).map(frozenset))
        if left < count * stages:
            break
        left -= count * stages
        models.append(Model(f"m{i}", count, shards, stages, draw(MEMORY), pins))
    models = models or [Model("m0", 1, 1, 1, draw(MEMORY))]
    apart: list[frozenset[str]] = []
    if draw(st.booleans()):
        apart.append(frozenset(draw(st.sets(st.sampled_from([model.name for model in models]), min_size=1))))
    return Cluster(servers, tuple(models), tuple(apart))


@dataclass(frozen=True, slots=True)
class Optimum:
    """Values that all best placements share.

    Attributes:
        objective: Eq. 6.
        matched: The most bytes that any of them matches, one to one, inside servers.
    """

    objective: int
    matched: int


def optimum(cluster: Cluster) -> Optimum | None:
    """Return the optimum over every placement; None if there is none."""
    best: tuple[int, int] | None = None
    for gpus in every_placement(cluster):
        found = eq6(cluster, gpus), -sum(most_matched(here) for here in gpus)
        best = found if best is None else min(best, found)
    return None if best is None else Optimum(best[0], -best[1])


def every_placement(cluster: Cluster) -> Iterator[list[list[int]]]:
    """Yield R_m of each used GPU of each server, for every placement."""
    for places in every_assignment(cluster):
        yield gpus_of(cluster, places)


def every_assignment(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yield the server of each unit, for every placement."""
    units = [unit for unit, _ in cluster.units()]
    for places in product(range(len(cluster.servers)), repeat=len(units)):
        if is_allowed(cluster, units, places):
            yield places


def gpus_of(cluster: Cluster, places: Sequence[int]) -> list[list[int]]:
    """Return R_m of each used GPU of each server."""
    gpus: list[list[int]] = [[] for _ in cluster.servers]
    for (_, model), place in zip(cluster.units(), places, strict=True):
        gpus[place] += [model.memory_bytes] * model.num_shards
    return gpus


def is_allowed(cluster: Cluster, units: Sequence[Unit], places: Sequence[int]) -> bool:
    """Return whether servers have room, and pins and sets kept apart are respected."""
    models = {model.name: model for model in cluster.models}
    for s, server in enumerate(cluster.servers):
        here = [models[unit.model] for unit, place in zip(units, places, strict=True) if place == s]
        if sum(model.num_shards for model in here) > server.num_gpus:
            return False
        if any(model.servers is not None and server.name not in model.servers for model in here):
            return False
        if any(sum(model.name in names for model in here) > 1 for names in cluster.apart):
            return False
    return True


def eq6(cluster: Cluster, gpus: Sequence[Sequence[int]]) -> int:
    """Return Eq. 6, given R_m of the GPUs of each server."""
    eq = [sum((r > 0) - (r < 0) for r in here) for here in gpus]
    return max(map(sum, gpus)) + max(n * server.memory_bytes for n, server in zip(eq, cluster.servers, strict=True))


def most_matched(here: Sequence[int]) -> int:
    """Return the most bytes of one-to-one pairs, by trying every order of the longer side."""
    sides = [[r for r in here if r > 0], [-r for r in here if r < 0]]
    few, many = sorted(sides, key=len)
    return max(sum(map(min, few, order)) for order in permutations(many, len(few)))
