"""The router's requirements of Ray. Light to import, because the command line is built from it."""

from __future__ import annotations

from dataclasses import dataclass

LOCAL = "auto"
"""Value of ``--cluster``: a Ray on this machine only, which starts and ends with the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySetup:
    """The resources that a driver places.

    Attributes:
        cluster: HOST:PORT of a Ray cluster's head, or ``LOCAL``.
        host: Where the router listens.
        num_slots: Number of actors, each of which gets
        num_cpus: CPUs, and
        num_gpus: GPUs.
    """

    cluster: str
    host: str
    num_slots: int
    num_cpus: int
    num_gpus: int
