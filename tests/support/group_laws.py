"""Processes of groups and the laws of groups, their members and requests, for any order of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from floodplain.cluster.groups.table import Change, Group, GroupTable
from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.group_messages import REQUEST_ANSWERS, Answer, Order
from floodplain.core.groups import GroupState

LAYERS = frozenset(range(4))


@dataclass(frozen=True)
class Said:
    """A message to the router; ``answer`` None refuses to prepare."""

    epoch: int
    number: int
    answer: Answer | None
    request: int | None = None
    is_ok: bool = True


@dataclass
class Process:
    """One life of an instance; ``done`` has obeyed orders of its group, ``next_number`` a group it is paused for."""

    epoch: int
    layers: frozenset[int] = LAYERS
    number: int | None = None
    next_number: int | None = None
    is_paused: bool = False
    is_stopped: bool = False
    serving: set[int] = field(default_factory=set)
    inbox: list[Order | tuple[str, int]] = field(default_factory=list)
    copying: list[tuple[int, Answer]] = field(default_factory=list)
    outbox: list[Said] = field(default_factory=list)
    done: set[type[wire.GroupOrder]] = field(default_factory=set)

    def will(self, *kinds: type[wire.GroupOrder]) -> set[int]:
        """Return requests of pending orders of these kinds."""
        orders = [one for one in self.inbox if isinstance(one, Order) and one.kind in kinds]
        return {request for order in orders for request in order.requests}

    def has_order(self, kind: type[wire.GroupOrder]) -> bool:
        return any(isinstance(one, Order) and one.kind is kind for one in self.inbox)

    def copies(self, request: int) -> bool:
        """Return whether it copies this request's KV, or has an order to."""
        under_way = {one for one, _ in self.copying} | self.will(wire.Fetch, wire.Collect)
        return request in under_way


Edge = tuple[GroupState, GroupState]


class GroupLaws:
    """The state of processes and the router; ``reached`` counts the transitions of groups."""

    def __init__(self, table: GroupTable, reached: Counter[Edge] | None = None) -> None:
        self.table, self.reached = table, Counter[Edge]() if reached is None else reached
        self.members: dict[int, Process] = {}
        self.former: list[Process] = []
        self.places: dict[int, tuple[str, int]] = {}  # live request -> ("queue", 0), ("at", epoch), ("held", number)
        self.past: list[Said] = []
        self.ended: set[int] = set()
        self.states: dict[int, GroupState] = {}
        self.sources: dict[tuple[int, int], set[int]] = {}  # (group, handed-over request) -> epochs that have its KV
        self.kept: dict[int, dict[int, frozenset[int]]] = {}  # group -> epoch -> layers
        self.swapped: set[tuple[int, int]] = set()  # (group, handed-over request) whose KV is in swap space
        self.copied: set[tuple[int, Answer, int, int]] = set()  # (group, answer, request, epoch)
        self.groups: dict[int, Group] = {}
        self.next_epoch = self.next_request = 1
        self.num_merged = 0

    def members_of(self, group: Group) -> Iterator[Process]:
        return (self.members[epoch] for epoch in group.epochs if epoch in self.members)

    def kept_of(self, number: int, epoch: int) -> frozenset[int]:
        return self.kept[number][epoch]

    def is_copied(self, request: int, order: Order, group: Group) -> bool:
        """Return whether every member that needs a copy of a request's KV has one."""
        copies = {
            answer: {epoch for epoch in group.epochs if (group.number, answer, request, epoch) in self.copied}
            for answer in REQUEST_ANSWERS.values()
        }
        in_place = self.sources.get((group.number, request), set())
        if (group.number, request) in self.swapped:
            in_place = set()
        everywhere = copies[Answer.FETCHED] | in_place == set(group.epochs)
        return order.epoch in copies[Answer.COLLECTED] or (order.epoch == group.leader and everywhere)

    def check_order(self, process: Process, order: Order, others: list[Process]) -> None:
        """Check the state of the other members when one obeys an order."""
        size = len(self.groups[order.number].epochs)
        if order.kind is wire.Drop:
            assert process.is_paused and len(others) == size - 1, "a member drops before all have confirmed"
            assert self.kept_of(order.number, process.epoch) <= process.layers, "a member keeps layers that it lacks"
        if order.kind in (wire.Settle, wire.Close):
            assert not any(one.copying for one in [process, *others]), "KV is unmapped while a copy reads it"
        if order.kind is wire.Fetch:
            own = [one for one in order.requests if process.epoch in self.sources[order.number, one]]
            assert all((order.number, request) in self.swapped for request in own), "KV is copied onto itself"
        first = {wire.Grow: wire.Settle, wire.Commit: wire.Move}.get(order.kind)
        assert first is None or all(first in one.done for one in [process, *others]), f"{order.kind} before {first}"
        is_leader = process.epoch == self.groups[order.number].leader
        if order.kind is wire.Return and not is_leader:
            leader = self.members[self.groups[order.number].leader]
            assert wire.Return in leader.done, "a stage leaves a pipeline under its leader"

    def check_end(self, change: Change) -> None:
        group = change.group
        if group.state is GroupState.OVER:
            assert not list(self.members_of(group)), "a member of a group that is over goes on"
        if group.state is GroupState.SOLO:
            for one in self.members_of(group):
                is_left = group.number in (one.number, one.next_number)
                assert not is_left or one.has_order(wire.Cancel), "a member is left in a group"

    def check(self) -> None:
        self.table.check_integrity()
        for group in self.table:
            secure = [
                self.kept_of(group.number, one.epoch) if one.has_order(wire.Drop) else one.layers
                for one in self.members_of(group)
            ]
            assert len(secure) == len(group.epochs) and frozenset[int]().union(*secure) == LAYERS, "a layer is lost"
        for one in self.members.values():
            assert self.table.find(one.epoch) or one.layers == LAYERS, "a member outside of groups lacks layers"
            assert self.table.find(one.epoch) or not one.has_order(wire.Drop), "a solo member is to drop layers"
        for request, (kind, where) in self.places.items():
            running = {one.epoch for one in self.members.values() if request in one.serving and not one.is_paused}
            assert len(running) <= 1 and (not running or (kind, where) == ("at", *running)), (
                "a request is in two places"
            )
            if kind == "at":
                one = self.members[where]
                is_there = request in one.serving | one.will(wire.Adopt) or ("submit", request) in one.inbox
                assert is_there or wire.Return in one.done, "a request is lost"
            assert kind != "held" or request in self.groups[where].fetches.requests, "a held request is forgotten"
        for group in self.table:
            assert group.awaited or len(group.fetches) or group.state is GroupState.PIPELINED, "a group waits for none"
            assert not len(group.fetches) or group.state is GroupState.DROPPING or group.state in REQUEST_ANSWERS
