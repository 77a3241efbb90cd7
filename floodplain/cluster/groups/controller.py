"""The router's side of groups: orders instances to drop layers, to run as a pipeline, and to restore layers.

``GroupTable`` decides which order is due, ``GroupPlan`` its content; this sends it, and moves requests in the table.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from floodplain.cluster.groups.plan import GroupPlan, MovingRequest, find_movable
from floodplain.cluster.groups.table import Change, Group, GroupTable, find_max_model_len
from floodplain.cluster.state.request_table import Entry, RequestTable
from floodplain.cluster.state.row_checks import check_moves, check_report, check_rows
from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.placements import submit_of
from floodplain.core.codec import WireError
from floodplain.core.group_sizes import plan_merge
from floodplain.core.groups import GroupState
from floodplain.cost.model_shape import ModelShape

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANGES = ("dropped", "restored", "cancelled", "ended")
MOST_REMEMBERED = 256


class Lately(dict[int, T]):
    """A dict by group number that keeps the last ``MOST_REMEMBERED`` entries."""

    def __setitem__(self, number: int, value: T) -> None:
        super().__setitem__(number, value)
        while len(self) > MOST_REMEMBERED:
            del self[next(iter(self))]


class GroupCounts:
    """Counters of group changes; they only grow.

    Attributes:
        num_entered: How often a group stayed in a state; not one that it leaves at once, with nothing to copy.
        num_changes: How often a group was changed, by ``CHANGES``; ``seconds``: the total time of these changes.
        num_carried: Requests that kept their KV in drops and restores; ``num_recomputed`` lost it.
        usable_s: Total time from a decision to drop until the group's pool was usable.
        restored_s: Seconds of the last restores, by group; ``problems``: why groups were not formed, or ended early.
    """

    def __init__(self) -> None:
        self.num_entered: Counter[GroupState] = Counter()
        self.num_changes: Counter[str] = Counter()
        self.seconds: dict[str, float] = dict.fromkeys(CHANGES, 0.0)
        self.num_carried = self.num_recomputed = 0
        self.usable_s = 0.0
        self.restored_s = Lately[float]()
        self.problems = Lately[str]()

    def note(self, number: int, change: str, seconds: float) -> None:
        """Count a change of a group, and log it."""
        self.num_changes[change] += 1
        self.seconds[change] += seconds
        if change == "restored":
            self.restored_s[number] = seconds
        why = f": {self.problems[number]}" if number in self.problems else ""
        logger.info("group %d was %s after %.2f s%s", number, change, seconds, why)


PREPARE_TIMEOUT_S = 10.0
"""If a member has not paused after this time, perhaps in a long step, the group is cancelled."""
STEP_TIMEOUT_S = 60.0
"""A group that awaits an answer and gets none for so long is ended."""


class GroupController:
    """The groups of a router. Everything is called on the router's event loop.

    ``send`` sends an order, and integers beside it, to the instance of an epoch; ``end`` ends its session for a reason;
    ``place`` places requests that wait.
    """

    def __init__(
        self,
        table: RequestTable,
        shape: ModelShape,
        send: Callable[[int, wire.GroupOrder, Sequence[int]], None],
        end: Callable[[int, str], None],
        place: Callable[[], None],
    ) -> None:
        self.groups = GroupTable(table.roster.name_of)
        self.counts = GroupCounts()
        self._table, self._shape = table, shape
        self._send, self._end, self._place = send, end, place
        self._plans: dict[int, GroupPlan] = {}

    def drop(self, epochs: Sequence[int]) -> int:
        """Begin to form a group of these instances, the leader first. Its number.

        Pipelined groups of them are taken in whole; the members' order is then one in which the layers can be divided.
        Raises ``UserError`` if they cannot form a group.
        """
        max_model_len = find_max_model_len(self._table.roster, epochs, self._shape.num_layers)
        old = {group.epochs: self._plans[group.number].kept for group in self.groups.find_old(epochs)}
        order, merge = plan_merge(epochs, old, self._shape.num_layers) if old else (tuple(epochs), None)
        change = self.groups.prepare(order)
        number, now = change.group.number, time.monotonic()
        names = tuple(map(self._table.roster.name_of, order))
        self._plans[number] = GroupPlan(number, order, max_model_len, now, now, merge, names=names)
        for epoch in epochs:
            self._table.roster.expect(epoch).part = "paused"
        self._apply(change)
        return number

    def restore(self, number: int) -> None:
        """Begin to restore a group. Raises ``UserError`` if there is none, or it is in the middle of a change."""
        change = self.groups.restore(number)
        self._plans[number].begun_s = time.monotonic()
        self._apply(change)

    def plan_of(self, number: int) -> GroupPlan | None:
        """The plan of a group that is being formed or exists; None if there is none."""
        return self._plans.get(number)

    def take(self, message: wire.GroupAnswer, integers: Sequence[int]) -> None:
        """Apply a member's answer. ``WireError`` if the sender is no member, or the answer is invalid."""
        plan, group = self._plans.get(message.number), self.groups.get(message.number)
        if plan is None or group is None:
            return
        if message.epoch not in plan.epochs:
            raise WireError(f"it is no member of group {message.number}")
        sender = message.epoch, message.number
        if isinstance(message, wire.Copied):
            change = self.groups.note_request(*sender, message.answer, message.request, is_ok=message.is_whole)
        else:
            answer = wire.answer_of(message, leads=message.epoch == group.leader)
            if not group.awaits(message.epoch, answer):
                return  # late, or sent twice
            is_taken = self._take_report(plan, message, integers)
            change = self.groups.note(*sender, answer) if is_taken else self.groups.refuse(*sender)
        self._note(plan, change)
        if group.is_confirmed and self.groups.get(group.number) is group:
            self._divide(plan, group)
        elif group.is_returned:
            self._bring_home(plan)

    def end(self, epoch: int) -> None:
        """An instance's session has ended: end its group, and a group that would be taken in."""
        changes = []
        while (group := self.groups.find(epoch)) is not None:
            self.counts.problems[group.number] = f"instance {self._plans[group.number].name_of(epoch)} is gone"
            changes.append(self.groups.end(epoch))
        for change in reversed(changes):  # the old group's first: no request is placed on it again
            self._apply(change)

    def forget(self, entry: Entry) -> None:
        """A request has ended at the router: its KV need not be copied any more."""
        for plan in self._plans.values():
            if entry.number in plan.moving:
                self.groups.abort(plan.number, entry.number)

    def look(self, now: float) -> None:
        """End groups that made no progress for too long; call often."""
        for group in self.groups:
            limit_s = PREPARE_TIMEOUT_S if group.state is GroupState.PREPARING else STEP_TIMEOUT_S
            if group.state is not GroupState.PIPELINED and now - self._plans[group.number].since_s > limit_s:
                self.counts.problems.setdefault(group.number, f"nothing was done for {limit_s:g} s: {group.state}")
                self._apply(self.groups.expire(group.number))

    def _note(self, plan: GroupPlan, change: Change | None) -> None:
        """Apply a change. An answer that is late or repeated makes none, and does not keep a group from expiring."""
        if change is not None:
            plan.since_s = time.monotonic()
            self._apply(change)

    def _take_report(self, plan: GroupPlan, message: wire.GroupAnswer, integers: Sequence[int]) -> bool:
        """Apply what a member reports with its answer. False: it cannot join the others."""
        match message:
            case wire.Prepared():
                reports = plan.reports.values()
                problem = message.problem or check_report(message, integers, self._shape.num_layers, reports)
                if problem is not None:
                    self.counts.problems[plan.number] = f"instance {plan.name_of(message.epoch)}: {problem}"
                    return False
                plan.reports[message.epoch] = message, tuple(integers)
            case wire.Planned():
                check_moves(message.num_moves, integers, plan.most_quanta, plan.report_of(0).quantum_blocks)
                plan.moves = message.num_moves, tuple(integers)
                for ticket in message.given_back:
                    self._table.check_ticket(message.epoch, ticket)
                    if (entry := self._table.find(message.epoch, ticket)) is not None:
                        self._table.lift(entry)
                        self._let_wait(entry)
            case wire.HandedOver():
                self._lift_rows(plan, message, integers)
                self._table.roster.expect(message.epoch).part = "leading"
        return True

    def _divide(self, plan: GroupPlan, group: Group) -> None:
        entries = {epoch: self._table.entries_of(epoch) for epoch in plan.epochs}
        plan.divide(self._shape, self._table.roster.expect(plan.epochs[0]).facts, entries)
        for epoch, by_ticket in entries.items():
            for entry in by_ticket.values():
                self._lift(plan, entry)
            self._table.roster.expect(epoch).part = "paused" if epoch == plan.epochs[0] else "grouped"
        for old in group.old:
            del self._plans[old.number]
        self._apply(self.groups.drop(group.number, plan.find_copiers()))

    def _lift_rows(self, plan: GroupPlan, message: wire.HandedOver, integers: Sequence[int]) -> None:
        check_rows(message.rows, integers, 0, plan.count_blocks(plan.most_quanta))
        entries = self._table.entries_of(message.epoch)
        found = {}
        for row, blocks in wire.split_blocks(message.rows, integers):
            if blocks and (entry := find_movable(entries, row)) is not None:
                found[entry.number] = MovingRequest(entry, row.num_computed, 0, blocks, blocks)
        plan.moving = found
        for entry in entries.values():
            self._lift(plan, entry)

    def _bring_home(self, plan: GroupPlan) -> None:
        """All members serve alone: each request is assigned to the member with the fewest blocks so far."""
        homes = plan.choose_homes(self._table.is_lifted)  # without requests whose clients disconnected
        for epoch in plan.epochs:
            self._table.roster.expect(epoch).part = None
        self._apply(self.groups.adopt(plan.number, homes))
        self._place()

    def _apply(self, change: Change | None) -> None:
        if change is None:
            return
        plan = self._plans[change.group.number]
        if change.entered is not None:
            self._enter(plan, change.entered)
        for epoch in change.ended:
            self._table.roster.expect(epoch).part = "grouped"  # no request is placed on it before its session ends
        for request in change.lost:
            self._let_wait(plan.moving[request].entry)
        for order in change.orders:
            self._order(plan, order)
        for epoch in change.ended:
            self._end(epoch, "group")
        if change.ended or change.lost or change.entered is not None:
            self._place()

    def _order(self, plan: GroupPlan, order: wire.Order) -> None:
        if order.kind is not wire.Adopt:
            self._send(order.epoch, *plan.message(order))
            return
        one = plan.moving[order.requests[0]]
        entry, request = one.entry, one.entry.as_request()
        self._table.put(entry, order.epoch)
        self.counts.num_carried += 1
        submit = submit_of(request, order.epoch, entry.ticket or 0, time.monotonic())
        adopt = wire.Adopt(order.epoch, plan.number, entry.number, one.num_computed, submit)
        self._send(order.epoch, adopt, request.prompt_token_ids + request.known_token_ids)

    def _enter(self, plan: GroupPlan, state: GroupState) -> None:
        now = plan.since_s = time.monotonic()
        self.counts.num_entered[state] += 1
        match state:
            case GroupState.EXCHANGING | GroupState.SETTLING:
                self._lead(plan, now)
            case GroupState.PIPELINED:
                self.counts.note(plan.number, "dropped", now - plan.begun_s)
            case GroupState.HANDOVER:  # the output of a later request there would be lost
                self._table.roster.expect(plan.epochs[0]).part = "paused"
            case GroupState.SOLO:
                self.counts.note(plan.number, "cancelled" if plan.sizes is None else "restored", now - plan.begun_s)
                self._forget_plan(plan)
            case GroupState.OVER:
                self.counts.note(plan.number, "ended", now - plan.begun_s)
                for one in plan.moving.values():
                    self._let_wait(one.entry)
                self._forget_plan(plan)

    def _lead(self, plan: GroupPlan, now: float) -> None:
        """Let the leader take requests. If no KV is to be copied, SETTLING is the first state that is seen entered."""
        leader = self._table.roster.expect(plan.epochs[0])
        if leader.part == "leading":
            return
        leader.part = "leading"
        self.counts.usable_s += now - plan.begun_s
        logger.info("group %d serves as a pipeline of instances %s", plan.number, ", ".join(plan.names))

    def _forget_plan(self, plan: GroupPlan) -> None:
        del self._plans[plan.number]
        for epoch in plan.epochs:
            if (instance := self._table.roster.get(epoch)) is not None:
                old = self.groups.find(epoch)  # of a cancelled merge
                instance.part = None if old is None else "leading" if epoch == old.leader else "grouped"

    def _lift(self, plan: GroupPlan, entry: Entry) -> None:
        """Take a request off its instance: with its KV if it is moving, else to be recomputed."""
        self._table.lift(entry)
        if entry.number not in plan.moving:
            self._table.wait(entry)
            self.counts.num_recomputed += bool(entry.tokens)

    def _let_wait(self, entry: Entry) -> None:
        """Let a request be recomputed, unless it has resumed or ended."""
        if self._table.is_lifted(entry):
            self._table.wait(entry)
            self.counts.num_recomputed += 1
