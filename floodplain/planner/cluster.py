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

    Attributes:
        name: Unique.
        num_gpus: How many.
        memory_bytes: Of each GPU: G_s of Eq. 6.
        domain: Servers of one domain reach each other's GPUs over the fast link, as in a rack; its own name otherwise.
        link: Bytes per second between two of its GPUs; 0 if it is not known.
    """

    name: str
    num_gpus: int
    memory_bytes: int
    domain: str
    link: int = 0

    def device(self, gpu: int) -> str:
        """Return the name of one of its GPUs, under which a coordinator knows the member that computes there."""
        return f"{self.name}-gpu{gpu}"


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how many equal instances of it are served.

    Attributes:
        name: Unique.
        count: How many instances.
        num_shards: Tensor-parallel shards of a stage: on one server, each on a GPU of its own.
        num_stages: Pipeline stages, which may be on different servers.
        memory_bytes: R_m of each GPU: what it lends if positive, what it needs if negative.
        servers: Names of the allowed servers; None if all are allowed.
        move_cost: Of moving one of its units in a new placement.
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
    """The shards of one stage of one instance, which are placed as one.

    Attributes:
        model: Its model's name.
        instance: Counted from 0.
        stage: Counted from 0.
    """

    model: str
    instance: int
    stage: int


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a unit.

    Attributes:
        server: Its server's name.
        gpus: One for each shard.
    """

    server: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A placement problem.

    Attributes:
        servers: In their order.
        models: In their order.
        apart: Sets of models of which a server holds at most one unit.
        current: Where units are now; units without an entry are new.
        consumers_per_producer: The most consumers that share a producer's memory and link; 1 as in the paper.
        within: A new placement may be worse than the optimum by this part of it, in exchange for fewer moves.
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
