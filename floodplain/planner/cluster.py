"""The values of a placement problem: servers, models, and rules on which model may be where.

Memory is counted *producer positive*: a model that lends memory has a positive number of bytes, one that needs more a
negative one. AQUA's section 5 uses both signs (its inputs and Eq. 5 this one, its text on Eq. 4 the other).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


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
        """The name of one of its GPUs, under which a coordinator knows the member that computes there."""
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
