"""What the front asks of Ray; light to import, because the command line is built from it."""

from __future__ import annotations

from dataclasses import dataclass

LOCAL = "auto"
"""Of ``--cluster``: a Ray of this machine alone, which starts and ends with the front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySetup:
    """What a driver is to have placed.

    Attributes:
        cluster: HOST:PORT of a Ray cluster's head, or ``LOCAL``.
        host: Where the front listens.
        num_slots: Actors, each of which gets
        num_cpus: CPUs, and
        num_gpus: GPUs.
    """

    cluster: str
    host: str
    num_slots: int
    num_cpus: int
    num_gpus: int
