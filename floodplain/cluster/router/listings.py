"""The state of a router as JSON models: instances, groups, migrations."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.router.router import Router
from floodplain.core.groups import GroupState


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
        rows.append(
            GroupRow(
                number=group.number,
                state=group.state,
                instances=list(group.epochs),
                names=list(plan.names),
                layers=[len(layers) for layers in plan.kept],
                blocks=plan.count_blocks(plan.sizes.num_settled_quanta) if plan.sizes is not None else 0,
                own_blocks=plan.num_own_blocks if plan.sizes is not None else 0,
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
        without_instance=router.table.num_unplaced,
        moved_requests=router.requests.num_moved,
        ends=dict(router.num_ends),
    )


def list_parts(router: Router, now: float) -> dict[str, Any]:
    """Instances, and groups and migrations if there may be some, as JSON values by name."""
    parts: dict[str, BaseModel] = {"instances": list_instances(router, now)}
    if router.group_controller is not None:
        parts["groups"] = list_groups(router.group_controller, now)
    if router.migration_controller is not None:
        parts["migrations"] = list_migrations(router.migration_controller)
    return {name: part.model_dump(mode="json") for name, part in parts.items()}
