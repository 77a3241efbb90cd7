"""HTTP routes about the cluster: the instances, groups, migrations; and how a server's application gets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.router import listings
from floodplain.cluster.router.engine import ClusterEngine
from floodplain.cluster.router.metrics import ClusterMetrics
from floodplain.cluster.router.router import Router
from floodplain.core.errors import UserError
from floodplain.core.groups import GroupState
from floodplain.server.app import Extension
from floodplain.server.auth import Client
from floodplain.web.bodies import BoundedModel, JsonRoute
from floodplain.web.errors import ApiError
from floodplain.web.gate import CLIENT_SCOPE_KEY
from floodplain.web.origin import expect_json, expect_own_names


class OperatorRoute(JsonRoute):
    """A route about the cluster. With API keys, any key may read, an admin's may change; else this machine may do both.

    Without keys, requests of a web page open on this machine are refused by ``Host``, ``Origin`` and ``Content-Type``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, behind the access check."""
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            _expect_operator(request)
            return await handle(request)

        return handle_checked


def _expect_operator(request: Request) -> None:
    client: Client | None = request.scope.get(CLIENT_SCOPE_KEY)
    is_change = request.method != "GET"
    if client is None:
        expect_own_names(request.scope, request.app.state.own_names)
        if is_change:
            expect_json(request.scope)
    elif is_change and not client.is_admin:
        raise ApiError(403, "this takes the key of an admin: a line admin NAME KEY of --api-key-file", code="forbidden")


POLL_S = 0.01


class Members(BoundedModel):
    """The instances: by slot (``0``, ``1``) or by epoch (``e7``), as ``/instances`` shows them; the first leads."""

    instances: list[str]


class Member(BoundedModel):
    """The group of this instance."""

    instance: str


def _add_group_routes(routes: APIRouter, router: Router) -> None:
    @routes.get("/groups")
    async def groups() -> listings.Groups:
        """Groups of instances that share the layers of the model."""
        return listings.list_groups(_expect_groups(router), time.monotonic())

    @routes.post("/v1/cluster/drop")
    async def drop(members: Members) -> listings.GroupRow:
        """Let instances drop layers and serve as a pipeline. Answers once all have confirmed, or says why not."""
        group_controller = _expect_groups(router)
        number = group_controller.drop([find_epoch(router, name) for name in members.instances])
        while (group := group_controller.groups.get(number)) is not None and group.state is GroupState.PREPARING:
            await asyncio.sleep(POLL_S)
        return _find_row(group_controller, number)

    @routes.post("/v1/cluster/restore")
    async def restore(member: Member) -> listings.GroupRow:
        """Let the instances of a group have all layers again. Answers at once."""
        group_controller = _expect_groups(router)
        group = group_controller.groups.find(find_epoch(router, member.instance))
        if group is None:
            raise UserError(f"instance {member.instance} is in no group: it has all layers")
        group_controller.restore(group.number)
        return _find_row(group_controller, group.number)


def find_epoch(router: Router, name: str) -> int:
    """The epoch of the instance of this name. Raises ``UserError`` if there is none."""
    digits = name.removeprefix("e")
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else -1
    for one in router.table.roster:
        if (one.epoch if name.startswith("e") else one.slot) == number:
            return one.epoch
    slots = ", ".join(f"e{one.epoch}" if one.slot is None else str(one.slot) for one in router.table.roster)
    raise UserError(f"there is no instance {name!r}: there are {slots or 'none'}")


def _find_row(group_controller: GroupController, number: int) -> listings.GroupRow:
    rows = [row for row in listings.list_groups(group_controller, time.monotonic()).groups if row.number == number]
    if not rows:
        raise ApiError(
            409, f"group {number} was not made: {group_controller.counts.problems.get(number) or 'it was cancelled'}"
        )
    return rows[0]


def _expect_groups(router: Router) -> GroupController:
    if router.group_controller is None:
        raise UserError("instances cannot drop layers: start the router with --relief manual")
    return router.group_controller


class Between(BoundedModel):
    """The source and the target instance: by slot (``0``, ``1``) or by epoch (``e7``), as ``/instances`` shows them."""

    source: str
    target: str


class Begun(BaseModel):
    """A migration has begun."""

    number: int


def _add_migration_routes(routes: APIRouter, router: Router) -> None:
    @routes.get("/migrations")
    async def migrations() -> listings.Migrations:
        """Running requests that move between instances."""
        return listings.list_migrations(_expect_migrations(router))

    @routes.post("/v1/cluster/migrate")
    async def migrate(between: Between) -> Begun:
        """Begin to move the shortest request that runs on an instance to another one. Answers at once."""
        migration_controller = _expect_migrations(router)
        source, target = find_epoch(router, between.source), find_epoch(router, between.target)
        return Begun(number=migration_controller.move_one(source, target))


def _expect_migrations(router: Router) -> MigrationController:
    if router.migration_controller is None:
        raise UserError("requests cannot move while they run: start the router with --relief migrate")
    return router.migration_controller


def extend_with(engine: ClusterEngine) -> Extension:
    """Adds metrics of each instance, ``/instances``, and the routes of groups and migrations.

    ``engine`` gets the name under which the server serves its model.
    """

    def extend(app: FastAPI, registry: CollectorRegistry, model_name: str) -> None:
        engine.served_name = model_name
        registry.register(ClusterMetrics(model_name, engine.router))
        routes = APIRouter(route_class=OperatorRoute)

        @routes.get("/instances")
        async def instances() -> listings.Listing:
            """Instances behind this endpoint."""
            return listings.list_instances(engine.router, time.monotonic())

        _add_group_routes(routes, engine.router)
        _add_migration_routes(routes, engine.router)
        app.include_router(routes)

    return extend
