"""The state of a router: requests as rows of a live page; instances, groups and migrations as JSON models."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pydantic import BaseModel

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.state.request_table import Entry
from floodplain.core.groups import GroupState
from floodplain.live.rows import MOST_ENDED, MOST_EVENTS, Event, LiveView, Row, events_of


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

    ``entered``: how often a group stayed in each state so far; ``restored``: seconds of the last restores, by number.
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


class RouterWatch:
    """Looks at a router, on its event loop.

    A request that is placed between two looks counts from the later one, or from its first token if that is earlier.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._known: dict[int, tuple[Row, Caller]] = {}
        self._ended: deque[Row] = deque(maxlen=MOST_ENDED)

    def __call__(self) -> LiveView:
        """The router now."""
        now = time.monotonic()
        known = {entry.number: (self._row_of(entry, caller, now), caller) for entry, caller in self._live()}
        for number, (row, caller) in self._known.items():
            if number not in known:
                self._ended.append(_ended(row, caller, now))
        self._known = known
        rows = {row.number: row for row in (*self._ended, *(row for row, _ in known.values()))}
        return LiveView(now_s=now, rows=rows, why=self._why(), parts=list_parts(self._router, now))

    def _live(self) -> list[tuple[Entry, Caller]]:
        requests = self._router.requests
        return [(entry, requests.caller_of(entry)) for entry in self._router.table.entries()]

    def _row_of(self, entry: Entry, caller: Caller, now: float) -> Row:
        before = self._known.get(entry.number)
        instance = None if entry.epoch is None else self._router.table.roster.get(entry.epoch)
        where = None if instance is None else instance.name
        times = caller.lifecycle.token_times_s
        return Row(
            number=entry.number,
            state="waiting" if where is None else "placed",
            tokens=len(entry.tokens),
            blocks=self._router.table.count_blocks(entry) if where is not None else 0,
            prompt=len(entry.request.prompt_token_ids),
            events=_moved(caller, None if before is None else before[0], where, now),
            first_token_s=round(times[0], 3) if times else None,
            reason=None,
            where=where,
        )

    def _why(self) -> str | None:
        num_unplaced = self._router.table.num_unplaced
        if num_unplaced:
            is_served = any(one.takes_requests for one in self._router.table.roster)
            return "no instance can take them now" if is_served else "no instance serves now"
        waiting = self._router.sums.total().num_waiting
        return f"their instances are full: {waiting} requests wait there" if waiting else None


def _moved(caller: Caller, before: Row | None, where: str | None, now: float) -> tuple[Event, ...]:
    events = events_of(caller.lifecycle) if before is None else before.events
    if where == (None if before is None else before.where):
        return events
    kind = "given back" if where is None else "placed"
    times = caller.lifecycle.token_times_s
    moved_s = min(now, times[0]) if times and kind == "placed" and len(events) == 1 else now
    return (events[0], *events[1:][-MOST_EVENTS + 2 :], (round(moved_s, 3), kind, 0))


def _ended(row: Row, caller: Caller, now: float) -> Row:
    """The last row of a request; one that ended without a reason was aborted."""
    reason = "abort" if caller.finish_reason is None else caller.finish_reason.value
    times = caller.lifecycle.token_times_s
    end_s = times[-1] if times and caller.finish_reason is not None else now
    return row._replace(
        state="finished",
        tokens=max(row.tokens, len(times)),
        blocks=0,
        events=(*row.events, (round(end_s, 3), "finished", 0)),
        first_token_s=round(times[0], 3) if times else None,
        reason=reason,
    )
