"""The state of one group: the answers and the copies of KV that it awaits. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from floodplain.cluster.wire.group_steps import REQUEST_ANSWERS, STEPS, Answer, Order, OrderKind, Step, Who
from floodplain.core.errors import InvariantError
from floodplain.core.groups import GroupEvent, GroupState, advance


class Outcome(StrEnum):
    """The outcome of a request's copies."""

    ADOPT = "adopt"
    LOST = "lost"
    ABORTED = "aborted"


@dataclass(slots=True)
class _Fetch:
    epochs: set[int]
    to: int
    has_failed: bool = False
    is_wanted: bool = True


class Fetches:
    """Progress of the copies of several requests.

    A request's blocks are reused only when every member that copies into them has answered, whether or not the
    request is still live: a late write would corrupt another request's KV.

    Args:
        sources: For each request, oldest first: epochs of the members that copy its KV, and that of the member that
            resumes it.
    """

    def __init__(self, sources: Mapping[int, tuple[set[int], int]]) -> None:
        self._fetches = {request: _Fetch(set(epochs), to) for request, (epochs, to) in sources.items()}

    def __len__(self) -> int:
        """The number of requests with copies due."""
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

    def answer(self, request: int, epoch: int, *, is_ok: bool) -> tuple[Outcome | None, int] | None:
        """A member has copied a request's KV, or failed to.

        Returns:
            The outcome of the request (None: other members have still to answer), and the epoch of the member that
            resumes it. None if this answer was not awaited.
        """
        fetch = self._fetches.get(request)
        if fetch is None or epoch not in fetch.epochs:
            return None
        fetch.epochs.remove(epoch)
        fetch.has_failed = fetch.has_failed or not is_ok
        if fetch.epochs:
            return None, fetch.to
        del self._fetches[request]
        if not fetch.is_wanted:
            return Outcome.ABORTED, fetch.to
        return (Outcome.LOST if fetch.has_failed else Outcome.ADOPT), fetch.to


class Group:
    """One group, under a unique number.

    Attributes:
        number: The group's number.
        epochs: Of its members, by place; the first is the leader.
        state: Its state.
        old: Groups that it takes in when it drops layers; they live until then.
        fetches: Requests whose KV is copied between members, or will be.
    """

    def __init__(self, number: int, epochs: tuple[int, ...], old: tuple[Group, ...] = ()) -> None:
        self.number, self.epochs, self.old = number, epochs, old
        self.state = GroupState.SOLO
        self.fetches = Fetches({})
        self._answered: set[int] = set()

    @property
    def leader(self) -> int:
        """The epoch of the member that runs the step loop."""
        return self.epochs[0]

    @property
    def awaited(self) -> tuple[int, ...]:
        """Epochs of members whose answer for the whole group is missing."""
        step = self._step
        return tuple(epoch for epoch in step.by.choose(self.epochs) if step.answer and epoch not in self._answered)

    @property
    def is_confirmed(self) -> bool:
        """Whether all members are paused and have reported what they hold: ``GroupTable.drop`` may follow."""
        return self.state is GroupState.PREPARING and not self.awaited

    @property
    def is_returned(self) -> bool:
        """Whether all members serve alone: ``GroupTable.adopt`` may follow."""
        return self.state is GroupState.RETURNING and not self.awaited

    @property
    def _step(self) -> Step:
        return STEPS.get(self.state, Step())

    def awaits(self, epoch: int, answer: Answer) -> bool:
        """Whether this answer of this member, for the whole group, is missing."""
        return self._step.answer is answer and epoch in self.awaited

    def take(self, event: GroupEvent) -> list[Order] | None:
        """Apply an event. The orders of the state that it leads to; None if the event is stale.

        A state in which nothing is to be copied is left at once.

        Raises:
            InvariantError: The event is impossible.
        """
        after = advance(self.state, event)
        if after is None:
            return None
        self.state = after
        self._answered.clear()
        step = self._step
        orders = [self.order(epoch, kind) for kind, who in step.orders for epoch in who.choose(self.epochs)]
        if after in REQUEST_ANSWERS:
            orders += self._begin_fetches(OrderKind.FETCH if after is GroupState.EXCHANGING else OrderKind.COLLECT)
            orders += self._end_fetches()
        return orders

    def note(self, epoch: int, answer: Answer) -> list[Order] | None:
        """A member has executed an order. The orders that follow; None if the answer is stale."""
        step = self._step
        if answer is not step.answer or epoch not in self.awaited:
            return None
        self._answered.add(epoch)
        return [] if self.awaited or step.event is None else self.take(step.event)

    def note_request(
        self, epoch: int, answer: Answer, request: int, *, is_ok: bool
    ) -> tuple[Outcome | None, list[Order]] | None:
        """A member has copied one request's KV, or failed to. Its outcome, and orders that follow. None if stale."""
        if REQUEST_ANSWERS.get(self.state) is not answer:
            return None
        answered = self.fetches.answer(request, epoch, is_ok=is_ok)
        if answered is None:
            return None
        outcome, owner = answered
        if outcome is None:
            return None, []
        kind = OrderKind.ADOPT if outcome is Outcome.ADOPT else OrderKind.RELEASE
        return outcome, [self.order(owner, kind, (request,)), *self._end_fetches()]

    def expect(self, state: GroupState) -> None:
        """Check that the group is in ``state`` and awaits no answer.

        Raises:
            InvariantError: The group is in another state, or answers are missing.
        """
        if self.state is not state or self.awaited:
            raise InvariantError(f"group {self.number} is {self.state}, awaiting {list(self.awaited)}, not {state}")

    def order(self, epoch: int, kind: OrderKind, requests: tuple[int, ...] = ()) -> Order:
        """An order to one member."""
        return Order(epoch, self.number, kind, requests)

    def _begin_fetches(self, kind: OrderKind) -> list[Order]:
        pending = {epoch: self.fetches.pending_of(epoch) for epoch in self.epochs}
        return [self.order(epoch, kind, requests) for epoch, requests in pending.items() if requests]

    def _end_fetches(self) -> list[Order]:
        event = self._step.event
        return [] if self.fetches or event is None else self.take(event) or []


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one call.

    Attributes:
        group: The group, in its new state.
        orders: Orders to send, in this sequence.
        entered: The state that this call entered; None if it did not change.
        ended: Epochs whose sessions must end now, last place first.
        lost: Requests that must be recomputed from their tokens.
    """

    group: Group
    orders: tuple[Order, ...] = ()
    entered: GroupState | None = None
    ended: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


def exchange_of(epochs: tuple[int, ...], copiers: Mapping[int, Collection[int]]) -> Fetches:
    """The copies of an exchange: these members copy each request's KV, and the leader resumes it."""
    return Fetches({request: (set(members), epochs[0]) for request, members in copiers.items()})


def collection_of(homes: Mapping[int, int]) -> Fetches:
    """The copies of a collection: each request's KV is copied by the member that resumes it."""
    return Fetches({request: ({home}, home) for request, home in homes.items()})


def cancel_orders(group: Group, without: int | None = None) -> tuple[Order, ...]:
    """Orders to resume, for members of a group under preparation; ``without``: one that ended or never paused."""
    epochs = Who.ALL.choose(group.epochs)
    return tuple(group.order(epoch, OrderKind.CANCEL) for epoch in epochs if epoch != without)
