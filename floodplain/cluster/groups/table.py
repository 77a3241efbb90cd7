"""All groups, and the progress of each: decides which orders are due (docs/design/018). No I/O, no clock.

A new group may take in pipelined groups, with all their members: they serve beside it until it drops layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from floodplain.cluster.state.roster import Roster
from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.group_messages import REQUEST_ANSWERS, STEPS, Answer, Order, Step
from floodplain.core.errors import InvariantError, UserError
from floodplain.core.groups import GroupEvent, GroupState, advance


@dataclass(slots=True)
class Fetch:
    """The copies of one request's KV that are due by the members ``epochs``; the member ``to`` resumes it."""

    epochs: set[int]
    to: int
    has_failed: bool = False
    is_wanted: bool = True


class Fetches:
    """The copies of several requests under way, each with its copying members and the one that resumes it.

    A request's blocks are reused only when every member that copies into them has answered, even if the request has
    ended: a late write would corrupt another request's KV.
    """

    def __init__(self, sources: Mapping[int, tuple[set[int], int]]) -> None:
        self._fetches = {request: Fetch(set(epochs), to) for request, (epochs, to) in sources.items()}

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def requests(self) -> tuple[int, ...]:
        """The live requests with copies due, oldest first."""
        return tuple(request for request, fetch in self._fetches.items() if fetch.is_wanted)

    def pending_of(self, epoch: int) -> tuple[int, ...]:
        """Requests that this member still has to copy, oldest first."""
        return tuple(request for request, fetch in self._fetches.items() if epoch in fetch.epochs)

    def abort(self, request: int) -> bool:
        """Mark a request as aborted; its copies under way still finish. True if it had copies due."""
        fetch = self._fetches.get(request)
        if fetch is not None:
            fetch.is_wanted = False
        return fetch is not None

    def answer(self, request: int, epoch: int, *, is_ok: bool) -> Fetch | None:
        """A member has copied a request's KV, or failed to; None if this answer was not awaited."""
        fetch = self._fetches.get(request)
        if fetch is None or epoch not in fetch.epochs:
            return None
        fetch.epochs.remove(epoch)
        fetch.has_failed = fetch.has_failed or not is_ok
        if not fetch.epochs:
            del self._fetches[request]
        return fetch


class Group:
    """One group, under a unique number; the member at place 0 leads. ``old``: groups that it takes in at its drop."""

    def __init__(self, number: int, epochs: tuple[int, ...], old: tuple[Group, ...] = ()) -> None:
        self.number, self.epochs, self.old = number, epochs, old
        self.state = GroupState.SOLO
        self.fetches = Fetches({})
        self.answered: set[int] = set()

    @property
    def leader(self) -> int:
        """The epoch of the member that runs the step loop."""
        return self.epochs[0]

    @property
    def step(self) -> Step:
        """The orders and answers of its state."""
        return STEPS.get(self.state, Step())

    @property
    def awaited(self) -> tuple[int, ...]:
        """Epochs of members whose answer for the whole group is missing."""
        step = self.step
        return tuple(epoch for epoch in step.by.choose(self.epochs) if step.answer and epoch not in self.answered)

    @property
    def is_confirmed(self) -> bool:
        """Whether all members are paused and have reported what they hold: ``GroupTable.drop`` may follow."""
        return self.state is GroupState.PREPARING and not self.awaited

    @property
    def is_returned(self) -> bool:
        """Whether all members serve alone: ``GroupTable.adopt`` may follow."""
        return self.state is GroupState.RETURNING and not self.awaited

    def awaits(self, epoch: int, answer: Answer) -> bool:
        """Whether this answer of this member, for the whole group, is missing."""
        return self.step.answer is answer and epoch in self.awaited

    def order(self, epoch: int, kind: type[wire.GroupOrder], requests: tuple[int, ...] = ()) -> Order:
        """An order to one member."""
        return Order(epoch, self.number, kind, requests)


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one call.

    Attributes:
        entered: The state that this call entered; None if it did not change.
        ended: Epochs whose sessions must end now, last place first.
        lost: Requests that must be recomputed from their tokens.
    """

    group: Group
    orders: tuple[Order, ...] = ()
    entered: GroupState | None = None
    ended: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


MIN_MEMBERS, MAX_MEMBERS = 2, 4


def check_members(epochs: Sequence[int]) -> None:
    """Raise ``UserError`` unless a group may have so many instances, each named once."""
    if not MIN_MEMBERS <= len(epochs) <= MAX_MEMBERS or len(set(epochs)) < len(epochs):
        raise UserError(f"a group has {MIN_MEMBERS} to {MAX_MEMBERS} different instances: name so many")


def find_max_model_len(roster: Roster, epochs: Sequence[int], num_layers: int) -> int:
    """Most tokens of a request in a group of these instances. ``UserError`` if they cannot be a group."""
    check_members(epochs)
    facts = []
    for epoch in epochs:
        instance = roster.get(epoch)
        if instance is None or not instance.can_drop or instance.is_leaving:
            raise UserError(f"instance {roster.name_of(epoch)} cannot drop layers: start the router with --relief")
        facts.append(instance.facts)
    if num_layers < len(epochs):
        raise UserError(f"{num_layers} layers cannot be shared by {len(epochs)} instances: name fewer")
    return min(one.max_model_len for one in facts)


class GroupTable:
    """All groups. A call that changes something returns a ``Change``; None: stale. ``name_of``: names for errors."""

    def __init__(self, name_of: Callable[[int], str] = str) -> None:
        self._name_of = name_of
        self._groups: dict[int, Group] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    def get(self, number: int) -> Group | None:
        """The group of this number; None if it has ended."""
        return self._groups.get(number)

    def find(self, epoch: int) -> Group | None:
        """The group of which this epoch is a member (the newest, if two); None if it serves alone."""
        return next((group for group in reversed(self._groups.values()) if epoch in group.epochs), None)

    def find_old(self, epochs: Sequence[int]) -> list[Group]:
        """The groups that a new group would take in. ``UserError`` if one changes now, or a member is not named."""
        found = {group.number: group for epoch in epochs if (group := self.find(epoch)) is not None}
        for group in found.values():
            if group.state is not GroupState.PIPELINED:
                raise UserError(f"group {group.number} is {group.state}: try again when it is {GroupState.PIPELINED}")
            if not set(group.epochs) < set(epochs):
                rest = [epoch for epoch in group.epochs if epoch not in epochs]
                more = (
                    f"instances {self._list(rest)}, too"
                    if rest
                    else "other instances beside them (cluster restore ends it)"
                )
                raise UserError(f"instances {self._list(group.epochs)} are group {group.number}: name {more}")
        return list(found.values())

    def _list(self, epochs: Sequence[int]) -> str:
        return ", ".join(map(self._name_of, epochs))

    # -- the caller decides ----------------------------------------------------------------------------------------

    def prepare(self, epochs: Sequence[int]) -> Change:
        """Begin a group of these instances, the leader first. ``UserError`` as ``check_members`` and ``find_old``."""
        check_members(epochs)
        group = Group(self._next_number, tuple(epochs), tuple(self.find_old(epochs)))
        self._next_number += 1
        self._groups[group.number] = group
        return self._take(group, GroupEvent.PREPARE)

    def drop(self, number: int, copiers: Mapping[int, Collection[int]]) -> Change:
        """Let the members drop parameters; all have confirmed.

        ``copiers``: of each request handed over with KV, oldest first, epochs of members that copy some, at least one.
        """
        group = self._expect(number, GroupState.PREPARING, copiers)
        leader = group.leader  # resumes all of them
        group.fetches = Fetches({request: (set(members), leader) for request, members in copiers.items()})
        for old in group.old:
            del self._groups[old.number]
        return self._take(group, GroupEvent.DROP)

    def restore(self, number: int) -> Change:
        """Begin to restore a group. Raises ``UserError`` if there is none, or it is in the middle of a change."""
        group = self._groups.get(number)
        if group is None:
            raise UserError(f"there is no group {number}: ask for the groups that there are")
        new = self.find(group.leader)
        if new is not None and new is not group:
            raise UserError(
                f"group {number} is about to join group {new.number}, which is {new.state}: try again later"
            )
        if group.state is not GroupState.PIPELINED:
            raise UserError(f"group {number} is {group.state}: try again when it is {GroupState.PIPELINED}")
        return self._take(group, GroupEvent.RESTORE)

    def adopt(self, number: int, homes: Mapping[int, int]) -> Change:
        """Let each request's KV be collected by the member that resumes it; all members serve alone again.

        ``homes`` has that member's epoch for each handed-over request that keeps its KV, oldest first.
        """
        group = self._expect(number, GroupState.RETURNING, {request: (home,) for request, home in homes.items()})
        group.fetches = Fetches({request: ({home}, home) for request, home in homes.items()})
        return self._take(group, GroupEvent.RETURNED)

    def expire(self, number: int) -> Change | None:
        """End a group that awaits something for too long: cancel it, or end its sessions. None if it awaits nothing."""
        group = self._groups.get(number)
        return None if group is None else self._end(group, GroupEvent.EXPIRED, None)

    def abort(self, number: int, request: int) -> bool:
        """Mark a handed-over request as aborted. True if copies of it are due: its blocks are released after them."""
        group = self._groups.get(number)
        return group is not None and group.fetches.abort(request)

    # -- messages of members ---------------------------------------------------------------------------------------

    def refuse(self, epoch: int, number: int) -> Change | None:
        """A member refuses to join and has not paused: cancel the group; the others resume."""
        group = self._groups.get(number)
        return self._end(group, GroupEvent.CANCELLED, epoch) if group is not None and epoch in group.epochs else None

    def note(self, epoch: int, number: int, answer: Answer) -> Change | None:
        """A member has executed an order."""
        group = self._groups.get(number)
        if group is None or not group.awaits(epoch, answer):
            return None
        group.answered.add(epoch)
        event = group.step.event
        return Change(group) if group.awaited or event is None else self._take(group, event)

    def note_request(self, epoch: int, number: int, answer: Answer, request: int, *, is_ok: bool) -> Change | None:
        """A member has copied one request's KV (``FETCHED``, ``COLLECTED``), or failed to."""
        group = self._groups.get(number)
        if group is None or REQUEST_ANSWERS.get(group.state) is not answer:
            return None
        fetch = group.fetches.answer(request, epoch, is_ok=is_ok)
        if fetch is None:
            return None
        if fetch.epochs:  # others have still to answer
            return Change(group)
        kind = wire.Adopt if fetch.is_wanted and not fetch.has_failed else wire.Release
        change = self._end_fetches(group, group.order(fetch.to, kind, (request,)))
        return replace(change, lost=(request,)) if fetch.is_wanted and fetch.has_failed else change

    def end(self, epoch: int) -> Change | None:
        """A session has ended: its group ends too. Call until None: an old group may exist beside a new one."""
        group = self.find(epoch)
        return None if group is None else self._end(group, GroupEvent.ENDED, epoch)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect(self, number: int, state: GroupState, copiers: Mapping[int, Collection[int]]) -> Group:
        group = self._groups.get(number)
        if group is None or not {epoch for epochs in copiers.values() for epoch in epochs} <= set(group.epochs):
            raise InvariantError(f"group {number} has ended, or an epoch of {[*copiers.values()]} is no member")
        if not all(copiers.values()):
            raise InvariantError(f"a request of group {number} is copied by no member")
        if group.state is not state or group.awaited:
            raise InvariantError(f"group {number} is {group.state}, awaiting {list(group.awaited)}, not {state}")
        return group

    def _take(self, group: Group, event: GroupEvent) -> Change:
        """Apply an event. A state in which nothing is to be copied is left at once."""
        state = advance(group.state, event)
        assert state is not None  # only refusals and timers may be late
        self._enter(group, state)
        orders = [group.order(epoch, kind) for kind, who in group.step.orders for epoch in who.choose(group.epochs)]
        if state not in REQUEST_ANSWERS:
            return Change(group, tuple(orders), state)
        kind = wire.Fetch if state is GroupState.EXCHANGING else wire.Collect
        pending = {epoch: group.fetches.pending_of(epoch) for epoch in group.epochs}
        orders += [group.order(epoch, kind, requests) for epoch, requests in pending.items() if requests]
        change = self._end_fetches(group, *orders)
        return change if change.entered else replace(change, entered=state)

    def _end_fetches(self, group: Group, *orders: Order) -> Change:
        """The change that sends these orders, and ends a state of copies if none is due any more."""
        event = group.step.event
        if group.fetches or event is None:
            return Change(group, orders)
        change = self._take(group, event)
        return replace(change, orders=orders + change.orders)

    def _end(self, group: Group, event: GroupEvent, epoch: int | None) -> Change | None:
        """End the group because of ``epoch``, or of no member; None if the event is stale."""
        before, after = group.state, advance(group.state, event)
        if after is None:
            return None
        self._enter(group, after)
        others = tuple(other for other in reversed(group.epochs) if other != epoch)  # it ended, or never paused
        if before is GroupState.PREPARING:
            return Change(group, tuple(group.order(other, wire.Cancel) for other in reversed(others)), after)
        return Change(group, (), after, others, group.fetches.requests)

    def _enter(self, group: Group, state: GroupState) -> None:
        group.state = state
        group.answered.clear()
        if state in (GroupState.SOLO, GroupState.OVER):
            del self._groups[group.number]

    def check_integrity(self) -> None:
        """Raise ``InvariantError`` if an epoch is in two groups, except one in preparation and one that it takes in."""
        old = {one.number for group in self._groups.values() for one in group.old}
        members = [epoch for group in self._groups.values() if group.number not in old for epoch in group.epochs]
        if len(members) != len(set(members)):
            raise InvariantError("an instance is in two groups")
