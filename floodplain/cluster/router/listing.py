"""``GET /instances``: the list of instances, for operators."""

from __future__ import annotations

import time

from fastapi import APIRouter
from pydantic import BaseModel

from floodplain.cluster.router.operators import OperatorRoute
from floodplain.cluster.router.router import Router


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
