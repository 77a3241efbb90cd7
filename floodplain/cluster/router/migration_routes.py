"""``/migrations``, and ``/v1/cluster/migrate``, by which an operator moves a request."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.router.group_routes import find_epoch
from floodplain.cluster.router.operators import OperatorRoute
from floodplain.cluster.router.router import Router
from floodplain.core.errors import UserError
from floodplain.web.bodies import BoundedModel


class Between(BoundedModel):
    """The source and the target instance: by slot (``0``, ``1``) or by epoch (``e7``), as ``/instances`` shows them."""

    source: str
    target: str


class MigrationRow(BaseModel):
    """One migration under way; epochs are None once the instance's life has ended."""

    number: int
    source: int | None
    target: int | None
    state: str
    copied_blocks: int


class Migrations(BaseModel):
    """Migrations under way, and counters: ``ended`` (by result), ``downtime_s`` and ``moved_tokens`` only grow."""

    migrations: list[MigrationRow]
    ended: dict[str, int]
    downtime_s: float
    moved_tokens: int


class Begun(BaseModel):
    """A migration has begun."""

    number: int


def list_migrations(migration_controller: MigrationController) -> Migrations:
    """The state of all migrations now."""
    rows = [
        MigrationRow(
            number=one.number, source=one.source, target=one.target, state=one.state, copied_blocks=one.num_copied
        )
        for one in migration_controller.migrations
    ]
    counts = migration_controller.counts
    return Migrations(
        migrations=rows,
        ended=dict(counts.num_ended),
        downtime_s=counts.downtime_s,
        moved_tokens=counts.num_tokens,
    )


def migration_router(router: Router) -> APIRouter:
    """The routes, for an app."""
    routes = APIRouter(route_class=OperatorRoute)

    @routes.get("/migrations")
    async def migrations() -> Migrations:
        """Running requests that move between instances."""
        return list_migrations(_expect_migrations(router))

    @routes.post("/v1/cluster/migrate")
    async def migrate(between: Between) -> Begun:
        """Begin to move the shortest request that runs on an instance to another one. Answers at once."""
        migration_controller = _expect_migrations(router)
        source, target = find_epoch(router, between.source), find_epoch(router, between.target)
        return Begun(number=migration_controller.move_one(source, target))

    return routes


def _expect_migrations(router: Router) -> MigrationController:
    if router.migration_controller is None:
        raise UserError("requests cannot move while they run: start the front with --relief migrate")
    return router.migration_controller
