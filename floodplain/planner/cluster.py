"""The values of a placement problem: servers, models, rules; and classes of like units, one integer for many of them.

Memory is counted *producer positive*: a model that lends memory has a positive number of bytes, one that needs more a
negative one. AQUA's section 5 uses both signs (its inputs and Eq. 5 this one, its text on Eq. 4 the other).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np


@dataclass(frozen=True, slots=True)
class Server:
    """GPUs that one fast link connects.

    ``memory_bytes`` is G_s of Eq. 6, of each GPU. Servers of one ``domain`` reach each other's GPUs over the fast link,
    as in a rack; else it is the server's name. ``link`` is in bytes per second between two GPUs; 0 if not known.
    """

    name: str
    num_gpus: int
    memory_bytes: int
    domain: str
    link: int = 0

    def device(self, gpu: int) -> str:
        """The name of one of its GPUs, which is that of the member that computes there at a coordinator."""
        return f"{self.name}-gpu{gpu}"


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how many equal instances of it are served.

    The shards of a stage are tensor-parallel: on one server, each on a GPU of its own. Stages are pipeline-parallel,
    and may be on different servers. ``memory_bytes`` is R_m of each GPU: what it lends if positive, what it needs if
    negative. ``servers`` are the names of the allowed ones; None: all. ``move_cost`` is that of one unit.
    """

    name: str
    count: int
    num_shards: int
    num_stages: int
    memory_bytes: int
    servers: frozenset[str] | None = None
    move_cost: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """The shards of one stage of one instance, which are placed as one; both are counted from 0."""

    model: str
    instance: int
    stage: int


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a unit: a server, and a GPU for each shard."""

    server: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A placement problem.

    A server holds at most one unit of each set in ``apart``. ``current`` has where units are now; others are new. A
    producer's memory and link are shared by ``consumers_per_producer``; 1 as in the paper. A new placement may be worse
    than the optimum by ``within``, a part of it, in exchange for fewer moves.
    """

    servers: tuple[Server, ...]
    models: tuple[Model, ...]
    apart: tuple[frozenset[str], ...] = ()
    current: dict[Unit, Spot] = field(default_factory=dict)
    consumers_per_producer: int = 1
    within: float = 0.05

    def units(self) -> Iterator[tuple[Unit, Model]]:
        """Yield every unit and its model, in a fixed order."""
        for model in self.models:
            for instance in range(model.count):
                for stage in range(model.num_stages):
                    yield Unit(model.name, instance, stage), model


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

    GPUs and memory are those of each server and each GPU; ``allowed``: of each class, whether its units may be there.
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
