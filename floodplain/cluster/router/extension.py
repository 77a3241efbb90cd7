"""The additions to a server's application if several instances are behind it."""

from __future__ import annotations

import time

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from floodplain.cluster.router.engine import ClusterEngine
from floodplain.cluster.router.group_routes import group_router
from floodplain.cluster.router.metrics import ClusterMetrics
from floodplain.cluster.router.migration_routes import migration_router
from floodplain.cluster.router.operators import OWN_NAMES, OperatorRoute
from floodplain.cluster.router.router import Router
from floodplain.server.app import Extension
from floodplain.web.origin import LOOPBACK_ONLY, OwnNames


class InstanceRow(BaseModel):
    """One instance. Commands name it by its ``slot``, or by ``e`` and its unique ``epoch``."""

    epoch: int
    slot: int | None
    host: str
    pid: int
    stage: int | None
    state: str
    age_s: float
    requests: int
    running: int
    waiting: int
    swapped: int
    used_blocks: int
    blocks: int
    generated_tokens: int


class Listing(BaseModel):
    """All instances, the number of requests without one, and counters of moved requests and ended lives."""

    instances: list[InstanceRow]
    without_instance: int
    moved_requests: int
    ends: dict[str, int]


def list_instances(router: Router, now: float) -> Listing:
    """The state of all instances now."""
    rows = []
    for one in router.table.roster:
        stats = router.sums.latest(one.epoch)
        rows.append(
            InstanceRow(
                epoch=one.epoch,
                slot=one.slot,
                host=one.facts.host,
                pid=one.facts.pid,
                stage=None if one.stage is None else one.stage.stage,
                state=one.state,
                age_s=now - one.joined_s,
                requests=len(one.tickets),
                running=stats.num_running,
                waiting=stats.num_waiting,
                swapped=stats.num_swapped,
                used_blocks=stats.num_used_blocks,
                blocks=one.num_blocks,
                generated_tokens=stats.num_generated_tokens,
            )
        )
    return Listing(
        instances=rows,
        without_instance=router.table.num_homeless,
        moved_requests=router.requests.num_moved,
        ends=dict(router.num_ends),
    )


def listing_router(router: Router) -> APIRouter:
    """The route, for an app."""
    routes = APIRouter(route_class=OperatorRoute)

    @routes.get("/instances")
    async def instances() -> Listing:
        """Instances behind this endpoint."""
        return list_instances(router, time.monotonic())

    return routes


def extend_with(engine: ClusterEngine, names: OwnNames = LOOPBACK_ONLY) -> Extension:
    """Adds metrics of each instance, ``/instances``, and the routes of groups and migrations.

    Args:
        engine: The instances.
        names: Host names under which the server answers about them, beside those of the loopback.
    """

    def extend(app: FastAPI, registry: CollectorRegistry) -> None:
        setattr(app.state, OWN_NAMES, names)
        registry.register(ClusterMetrics(engine.model_name, engine.router))
        app.include_router(listing_router(engine.router))
        app.include_router(group_router(engine.router))
        app.include_router(migration_router(engine.router))

    return extend
