"""``/groups``, and ``/v1/cluster/drop`` and ``/v1/cluster/restore``, by which an operator drops and restores layers."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from pydantic import BaseModel

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.router.operators import OperatorRoute
from floodplain.cluster.router.router import Router
from floodplain.core.errors import UserError
from floodplain.core.groups import GroupState
from floodplain.web.bodies import BoundedModel
from floodplain.web.errors import ApiError

POLL_S = 0.01


class Members(BoundedModel):
    """The instances: by slot (``0``, ``1``) or by epoch (``e7``), as ``/instances`` shows them; the first leads."""

    instances: list[str]


class Member(BoundedModel):
    """The group of this instance."""

    instance: str


class GroupRow(BaseModel):
    """One group.

    ``instances`` are the epochs of its members, ``names`` their names in commands.
    ``blocks`` are those of its pool once it is settled, ``own_blocks`` those of all members' own pools; ``seconds`` is
    the time since the current or last change was requested.
    """

    number: int
    state: str
    instances: list[int]
    names: list[str]
    layers: list[int]
    blocks: int
    own_blocks: int
    requests_on_their_way: int
    seconds: float


class Groups(BaseModel):
    """All groups, and counters of changes.

    ``entered`` says how often a group stayed in each state so far; ``restored`` has the seconds that the last
    restores took, by number.
    """

    groups: list[GroupRow]
    entered: dict[str, int]
    restored: dict[int, float]
    changes: dict[str, int]
    seconds: dict[str, float]
    carried_requests: int
    recomputed_requests: int


def list_groups(group_controller: GroupController, now: float) -> Groups:
    """The state of all groups now."""
    rows = []
    for group in group_controller.groups:
        plan = group_controller.plan_of(group.number)
        if plan is None:
            continue
        is_divided = plan.sizes is not None
        rows.append(
            GroupRow(
                number=group.number,
                state=group.state,
                instances=list(group.epochs),
                names=list(plan.names),
                layers=[len(layers) for layers in plan.kept],
                blocks=plan.count_blocks(plan.sizes.num_settled_quanta) if plan.sizes is not None else 0,
                own_blocks=plan.num_own_blocks if is_divided else 0,
                requests_on_their_way=len(group.fetches),
                seconds=now - plan.begun_s,
            )
        )
    return Groups(
        groups=rows,
        entered={state.value: group_controller.counts.num_entered[state] for state in GroupState},
        restored=dict(group_controller.counts.restored_s),
        changes=dict(group_controller.counts.num_changes),
        seconds=dict(group_controller.counts.seconds),
        carried_requests=group_controller.counts.num_carried,
        recomputed_requests=group_controller.counts.num_recomputed,
    )


def group_router(router: Router) -> APIRouter:
    """The routes, for an app."""
    routes = APIRouter(route_class=OperatorRoute)

    @routes.get("/groups")
    async def groups() -> Groups:
        """Groups of instances that share the layers of the model."""
        return list_groups(_expect_groups(router), time.monotonic())

    @routes.post("/v1/cluster/drop")
    async def drop(members: Members) -> GroupRow:
        """Let instances drop layers and serve as a pipeline. Answers once all have confirmed, or says why not."""
        group_controller = _expect_groups(router)
        number = group_controller.drop([find_epoch(router, name) for name in members.instances])
        while (group := group_controller.groups.get(number)) is not None and group.state is GroupState.PREPARING:
            await asyncio.sleep(POLL_S)
        return _find_row(group_controller, number)

    @routes.post("/v1/cluster/restore")
    async def restore(member: Member) -> GroupRow:
        """Let the instances of a group have all layers again. Answers at once."""
        group_controller = _expect_groups(router)
        group = group_controller.groups.find(find_epoch(router, member.instance))
        if group is None:
            raise UserError(f"instance {member.instance} is in no group: it has all layers")
        group_controller.restore(group.number)
        return _find_row(group_controller, group.number)

    return routes


def find_epoch(router: Router, name: str) -> int:
    """The epoch of the instance of this name.

    Raises:
        UserError: There is none of this name.
    """
    digits = name.removeprefix("e")
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else -1
    for one in router.table.roster:
        if (one.epoch if name.startswith("e") else one.slot) == number:
            return one.epoch
    slots = ", ".join(f"e{one.epoch}" if one.slot is None else str(one.slot) for one in router.table.roster)
    raise UserError(f"there is no instance {name!r}: there are {slots or 'none'}")


def _find_row(group_controller: GroupController, number: int) -> GroupRow:
    rows = [row for row in list_groups(group_controller, time.monotonic()).groups if row.number == number]
    if not rows:
        raise ApiError(
            409, f"group {number} was not made: {group_controller.counts.problems.get(number) or 'it was cancelled'}"
        )
    return rows[0]


def _expect_groups(router: Router) -> GroupController:
    if router.group_controller is None:
        raise UserError("instances cannot drop layers: start the front with --relief manual")
    return router.group_controller
