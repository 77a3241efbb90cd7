"""Classes of like units and groups of like servers: one integer stands for many of them.

Interchangeable units and servers make integer programs slow: a solver would try every renaming.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from floodplain.planner.cluster import Cluster, Server, Unit

Counts = tuple[int, ...]
"""Units of each class on one server: a *mix*."""


@dataclass(frozen=True, slots=True)
class UnitClass:
    """Units that every constraint and equation treats alike.

    ``memory_bytes`` is R_m of each GPU. ``servers`` are the names of the allowed ones; None: all. ``apart`` has indices
    in ``Cluster.apart``.
    """

    units: tuple[Unit, ...]
    num_gpus: int
    memory_bytes: int
    servers: frozenset[str] | None
    apart: frozenset[int]
    move_cost: int

    @property
    def sign(self) -> int:
        """T of Eq. 5: 1 for a producer, -1 for a consumer, and 0 for a model that neither lends nor needs."""
        return (self.memory_bytes > 0) - (self.memory_bytes < 0)

    def may_be_on(self, server: Server) -> bool:
        """Whether its pins and its number of shards allow that server."""
        return self.num_gpus <= server.num_gpus and (self.servers is None or server.name in self.servers)


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """Servers that every constraint and equation treats alike, as indices in ``Cluster.servers``.

    GPUs and memory are those of each server and of each GPU. ``allowed`` tells for each class whether its units may be
    there.
    """

    servers: tuple[int, ...]
    num_gpus: int
    memory_bytes: int
    allowed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A cluster, with its units in classes and its servers in groups."""

    cluster: Cluster
    classes: tuple[UnitClass, ...]
    groups: tuple[ServerGroup, ...]

    @property
    def num_units(self) -> Counts:
        """Return the number of units of each class."""
        return tuple(len(each.units) for each in self.classes)

    @property
    def num_free_gpus(self) -> int:
        """How many GPUs stay empty; below zero if there are too few."""
        taken = sum(len(each.units) * each.num_gpus for each in self.classes)
        return sum(server.num_gpus for server in self.cluster.servers) - taken

    def balance(self, counts: Sequence[int]) -> tuple[int, int]:
        """``mem_s`` and ``eq_s`` (Eq. 4 and 5) of a server with these units; each GPU counts, as in AQUA."""
        gpus = [(count * each.num_gpus, each) for count, each in zip(counts, self.classes, strict=True)]
        return sum(n * each.memory_bytes for n, each in gpus), sum(n * each.sign for n, each in gpus)

    def least(self) -> tuple[int, int]:
        """Lower bounds of ``max mem_s`` and of ``max G_s eq_s``: a maximum is not below the mean.

        For the latter: if no G_s eq_s is above E, all eq_s together are at most E times the sum of 1 / G_s.
        """
        mem, eq = self.balance(self.num_units)
        servers = self.cluster.servers
        sizes = Counter(server.memory_bytes for server in servers)
        inverse = sum((Fraction(count, size) for size, count in sizes.items()), Fraction(0))
        return math.ceil(Fraction(mem, len(servers))), math.ceil(eq / inverse)

    def objective(self, mixes: Sequence[Sequence[int]]) -> int:
        """Eq. 6, in bytes, of a placement: ``mixes`` has the mix of each server, in their order."""
        return sum(self.maxima(mixes))

    def maxima(self, mixes: Sequence[Sequence[int]]) -> tuple[int, int]:
        """``max mem_s`` and ``max G_s eq_s`` of a placement; all are less than 2^63 (``inputs.py``)."""
        counts = np.array(mixes, dtype=np.int64)
        mem = counts @ np.array([each.num_gpus * each.memory_bytes for each in self.classes], dtype=np.int64)
        eq = counts @ np.array([each.num_gpus * each.sign for each in self.classes], dtype=np.int64)
        gpu_bytes = np.array([server.memory_bytes for server in self.cluster.servers], dtype=np.int64)
        return int(mem.max()), int((eq * gpu_bytes).max())


def classify(cluster: Cluster) -> Problem:
    """Return the classes and groups of a cluster."""
    classes = _classes_of(cluster)
    of_kind = {(each.num_gpus, each.servers): each for each in classes}
    alike: defaultdict[tuple[int, int, tuple[bool, ...]], list[int]] = defaultdict(list)
    for place, server in enumerate(cluster.servers):
        allowed = tuple(each.may_be_on(server) for each in of_kind.values())
        alike[server.num_gpus, server.memory_bytes, allowed].append(place)
    groups = []
    for (num_gpus, memory_bytes, of_kinds), some in alike.items():
        allowed_of = dict(zip(of_kind, of_kinds, strict=True))
        of_classes = tuple(allowed_of[each.num_gpus, each.servers] for each in classes)
        groups.append(ServerGroup(tuple(some), num_gpus, memory_bytes, of_classes))
    return Problem(cluster, classes, tuple(groups))


def _classes_of(cluster: Cluster) -> tuple[UnitClass, ...]:
    apart_of = {
        model.name: frozenset(place for place, names in enumerate(cluster.apart) if model.name in names)
        for model in cluster.models
    }
    alike: defaultdict[tuple[int, int, frozenset[str] | None, frozenset[int], int], list[Unit]] = defaultdict(list)
    for unit, model in cluster.units():
        key = (model.num_shards, model.memory_bytes, model.servers, apart_of[model.name], model.move_cost)
        alike[key].append(unit)
    return tuple(UnitClass(tuple(units), *key) for key, units in alike.items())
