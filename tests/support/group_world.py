"""Processes that obey a router's orders for groups, late and in any order; the router follows a ``GroupBook``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

from floodplain.cluster.groups.table import Change, Group
from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.group_messages import Answer, Order
from floodplain.core.errors import UserError
from floodplain.core.group_sizes import plan_merge
from floodplain.core.groups import GroupState
from tests.support.group_laws import LAYERS, GroupLaws, Process, Said

ENDED = (GroupState.SOLO, GroupState.OVER)
TAKES_REQUESTS = (GroupState.EXCHANGING, GroupState.SETTLING, GroupState.PIPELINED, GroupState.FILLING)
REPLIES = {
    wire.Settle: Answer.SETTLED, wire.Plan: Answer.PLANNED, wire.Move: Answer.MOVED,
    wire.Fill: Answer.FILLED, wire.Return: Answer.RETURNED, wire.Close: Answer.CLOSED,
}  # fmt: skip


def cut_evenly(size: int) -> tuple[range, ...]:
    ends = [place * len(LAYERS) // size for place in range(size + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(ends))


class World(GroupLaws):
    """See the module."""

    # -- processes -------------------------------------------------------------------------------------------------

    def join(self) -> None:
        self.members[self.next_epoch] = Process(self.next_epoch)
        self.next_epoch += 1
        self.place()

    def end(self, epoch: int) -> None:
        """A life ends for the router; its process may still run, and send messages later."""
        process = self.members.pop(epoch, None)
        if process is None:
            return
        self.former.append(process)
        for request, place in self.places.items():
            if place == ("at", epoch):
                self.places[request] = ("queue", 0)
        for _ in range(2):  # of its group, and of a group that is to merge it
            self.apply(self.table.end(epoch))
        assert self.table.find(epoch) is None
        self.place()

    def obey(self, process: Process, dice: Random, *, is_faulty: bool) -> None:
        """Obey the oldest order."""
        order = process.inbox.pop(0)
        if not isinstance(order, Order):
            verb, request = order
            (process.serving.add if verb == "submit" else process.serving.discard)(request)
            return
        number = order.number
        others = [
            one for one in self.members.values() if number in (one.number, one.next_number) and one is not process
        ]
        is_living = process.epoch in self.members
        if is_living:
            self.check_order(process, order, others)
        if order.kind is wire.Prepare:
            is_willing = not is_faulty or dice.random() < 0.9
            if is_willing:
                process.next_number, process.is_paused = number, True
            process.outbox.append(Said(process.epoch, order.number, Answer.CONFIRMED if is_willing else None))
            return
        if number not in (process.number, process.next_number):
            return  # it refused, and was ordered to go on
        self.change_memory(process, order)
        process.done.add(order.kind)
        if order.kind in (wire.Fetch, wire.Collect):
            answer = Answer.FETCHED if order.kind is wire.Fetch else Answer.COLLECTED
            process.copying += [(request, answer) for request in order.requests]
        if order.kind in REPLIES:
            process.outbox.append(Said(process.epoch, order.number, REPLIES[order.kind]))

    def change_memory(self, process: Process, order: Order) -> None:
        match order.kind:
            case wire.Cancel:
                process.is_paused, process.next_number = False, None
            case wire.Drop:
                process.layers, process.is_paused = self.kept_of(order.number, process.epoch), False
                process.number, process.next_number = order.number, None
                process.serving.clear()
                process.done.clear()
                process.outbox.append(Said(process.epoch, order.number, Answer.DROPPED))
            case wire.Adopt:
                process.serving |= set(order.requests)
            case wire.Plan:
                process.is_paused = True
            case wire.Commit:
                process.is_paused = False
            case wire.Fill:
                process.layers = LAYERS
            case wire.Return:
                process.serving.clear()
            case wire.Close:
                process.number = None
                process.done.clear()

    def finish_copy(self, process: Process, dice: Random, *, is_faulty: bool) -> None:
        request, answer = process.copying.pop(dice.randrange(len(process.copying)))
        is_ok = not is_faulty or dice.random() < 0.8
        process.outbox.append(Said(process.epoch, process.number or 0, answer, request, is_ok))

    # -- the router -------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        self.places[self.next_request] = ("queue", 0)
        self.next_request += 1
        self.place()

    def place(self) -> None:
        """Place waiting requests on members that take some, the least busy one first."""
        for request in [request for request, place in self.places.items() if place[0] == "queue"]:
            takers = [epoch for epoch in self.members if self.takes_requests(epoch)]
            if takers:
                load = Counter(place[1] for place in self.places.values() if place[0] == "at")
                epoch = min(takers, key=lambda one: (load[one], one))
                self.places[request] = ("at", epoch)
                self.members[epoch].inbox.append(("submit", request))

    def takes_requests(self, epoch: int) -> bool:
        group = self.table.find(epoch)
        return group is None or (group.leader == epoch and group.state in TAKES_REQUESTS)

    def prepare(self, epochs: list[int]) -> None:
        try:
            old = {group.epochs: self.ranges_of(group) for group in self.table.find_old(epochs)}
            order, kept = tuple(epochs), cut_evenly(len(epochs))
            if old:
                order, merge = plan_merge(epochs, old, len(LAYERS))
                kept = merge.kept
            change = self.table.prepare(order)
        except UserError:
            assert any(self.table.find(epoch) for epoch in epochs)
            return
        assert change.group.number not in self.groups
        self.groups[change.group.number] = change.group
        self.kept[change.group.number] = dict(zip(order, map(frozenset, kept), strict=True))
        self.apply(change)

    def ranges_of(self, group: Group) -> list[range]:
        layers = [self.kept_of(group.number, epoch) for epoch in group.epochs]
        return [range(min(part), max(part) + 1) for part in layers]

    def restore(self, number: int) -> None:
        try:
            self.apply(self.table.restore(number))
        except UserError:
            group = self.table.get(number)
            is_merged = group is not None and self.table.find(group.leader) is not group
            assert group is None or is_merged or group.state is not GroupState.PIPELINED

    def abort(self, request: int) -> None:
        kind, where = self.places.pop(request)
        if kind == "at":
            self.members[where].inbox.append(("abort", request))
        assert kind != "held" or self.table.abort(where, request), "a held request is unknown to its group"

    def hear(self, said: Said) -> Change | None:
        if said.answer is None:
            return self.table.refuse(said.epoch, said.number)
        if said.request is not None:
            return self.table.note_request(said.epoch, said.number, said.answer, said.request, is_ok=said.is_ok)
        return self.table.note(said.epoch, said.number, said.answer)

    def deliver(self, process: Process) -> None:
        said = process.outbox.pop(0)
        change = self.hear(said)
        assert change is None or said.epoch in self.members, "a life that is over is believed"
        assert change is None or said.number not in self.ended, "an ended group is believed"
        self.past.append(said)
        if said.request is not None and said.answer is not None and said.is_ok:
            self.copied.add((said.number, said.answer, said.request, said.epoch))
        self.apply(change)

    def repeat(self, said: Said) -> None:
        """Repeat an earlier message: it must change nothing."""
        assert self.hear(said) is None, f"{said} is believed twice"

    def apply(self, change: Change | None) -> None:
        if change is None:
            return
        group, has_ended = change.group, change.group.state in ENDED
        if change.entered:
            self.reached[self.states.get(group.number, GroupState.SOLO), change.entered] += 1
            self.states[group.number] = change.entered
        assert group.number not in self.ended and has_ended == (self.table.get(group.number) is None)
        if has_ended:
            self.ended.add(group.number)
        for request in change.lost:
            self.places[request] = ("queue", 0)
        for order in change.orders:
            self.send(order, group, has_ended=has_ended)
        for epoch in change.ended:
            self.end(epoch)
        self.check_end(change)
        self.decide(group)
        self.place()

    def send(self, order: Order, group: Group, *, has_ended: bool) -> None:
        assert order.number == group.number and order.epoch in group.epochs and order.epoch in self.members
        assert not has_ended or order.kind is wire.Cancel, "an ended group is given orders"
        if order.kind in (wire.Adopt, wire.Release):
            for request in order.requests:
                assert not any(one.copies(request) for one in self.members_of(group)), "a copy is under way"
                assert order.kind is wire.Release or self.places[request] == ("held", group.number)
                if order.kind is wire.Adopt:
                    assert self.is_copied(request, order, group), "a request goes on without its KV"
                    self.places[request] = ("at", order.epoch)
        self.members[order.epoch].inbox.append(order)

    def decide(self, group: Group) -> None:
        """Act as the router's caller when all have confirmed, or returned. One in five requests loses its KV."""
        rows = {
            request: epoch for request, (kind, epoch) in self.places.items() if kind == "at" and epoch in group.epochs
        }
        keeping = {request: epoch for request, epoch in rows.items() if request % 5}
        if group.is_confirmed or group.is_returned:
            for request in rows:
                self.places[request] = ("held", group.number) if request in keeping else ("queue", 0)
        if group.is_confirmed:
            self.apply(self.table.drop(group.number, self.find_copiers(group, keeping)))
        elif group.is_returned:
            assert set(rows.values()) <= {group.leader}
            size = len(group.epochs)
            self.apply(self.table.adopt(group.number, {one: group.epochs[one % size] for one in keeping}))

    def find_copiers(self, group: Group, keeping: dict[int, int]) -> dict[int, set[int]]:
        """Some single instances' requests are in swap space; all members of an old group have its requests' KV."""
        old = {epoch: set(one.epochs) for one in group.old for epoch in one.epochs}
        self.ended |= {one.number for one in group.old}
        self.num_merged += bool(group.old)
        copiers = {}
        for request, epoch in keeping.items():
            self.sources[group.number, request] = in_place = old.get(epoch, {epoch})
            if epoch not in old and not request % 3:
                self.swapped.add((group.number, request))
                in_place = set()
            copiers[request] = set(group.epochs) - in_place
        return copiers

    # -- stories ---------------------------------------------------------------------------------------------------

    def step(self, dice: Random, *, is_faulty: bool) -> bool:
        """Execute one possible event; False if there is none."""
        candidates = [*self.members.values(), *(self.former if is_faulty else [])]
        steps: list[Callable[[], None]] = []
        for one in candidates:
            if one.inbox and not one.is_stopped:
                steps.append(lambda one=one: self.obey(one, dice, is_faulty=is_faulty))  # type: ignore[misc]
            if one.copying and not one.is_stopped:
                steps.append(lambda one=one: self.finish_copy(one, dice, is_faulty=is_faulty))  # type: ignore[misc]
            if one.outbox:
                steps.append(lambda one=one: self.deliver(one))  # type: ignore[misc]
        if steps:
            dice.choice(steps)()
        return bool(steps)

    def settle(self, dice: Random) -> None:
        """Run everything in flight to its end, without faults."""
        self.former.clear()
        while self.step(dice, is_faulty=False):
            self.check()

    def finish(self, dice: Random) -> None:
        """A group of these members runs to its end; then every live request is served."""
        if len(self.members) > 1:
            self.prepare(sorted(self.members)[:4])
        self.settle(dice)
        assert all(group.state is GroupState.PIPELINED for group in self.table), "a group waits for ever"
        for group in self.table:
            self.restore(group.number)
        self.settle(dice)
        assert len(self.table) == 0
        for request, place in self.places.items():
            assert place[0] == "at" and request in self.members[place[1]].serving, "a request is not served"
