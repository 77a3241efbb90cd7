"""What members of a group are told and answer, state by state. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from floodplain.core.groups import GroupEvent, GroupState


class OrderKind(StrEnum):
    """What a member is told to do."""

    PREPARE = "prepare"
    """Pause at a step boundary; say what is held. Answered by CONFIRMED, or by a refusal."""
    CANCEL = "cancel"
    """Go on as before."""
    DROP = "drop"
    """Unmap parameters, map the group's pool, link with both neighbours: DROPPED."""
    FETCH = "fetch"
    """Copy KV of each of these requests, in the kept layers, from the member that has it: FETCHED for each."""
    ADOPT = "adopt"
    """Go on with these requests: their KV is there."""
    RELEASE = "release"
    """Free the blocks that are reserved for these requests: no member writes to them any more."""
    SETTLE = "settle"
    """Unmap KV of dropped layers; map all settled quanta: SETTLED."""
    GROW = "grow"
    """Every member has mapped the settled quanta: add their blocks to the ledger."""
    PLAN = "plan"
    """Drain the pipeline, give back what is too much, plan the shrink: PLANNED."""
    MOVE = "move"
    """Move blocks as planned, unmap quanta: MOVED."""
    COMMIT = "commit"
    """Every member has moved: commit the shrink and go on."""
    FILL = "fill"
    """Map dropped parameters, and fill them: FILLED."""
    RETURN = "return"
    """Leave the pipeline; the leader hands over all requests. Serve alone: RETURNED."""
    COLLECT = "collect"
    """Copy KV of each of these requests, in all layers, to blocks of the own pool: COLLECTED for each."""
    CLOSE = "close"
    """Unmap the group's KV; grow the own pool to its size before the group: CLOSED."""


class Answer(StrEnum):
    """What a member says when it has done what it was told."""

    CONFIRMED = "confirmed"
    DROPPED = "dropped"
    FETCHED = "fetched"
    SETTLED = "settled"
    PLANNED = "planned"
    MOVED = "moved"
    FILLED = "filled"
    RETURNED = "returned"
    COLLECTED = "collected"
    CLOSED = "closed"


class Who(StrEnum):
    """Which members."""

    ALL = "all"
    LEADER = "leader"
    OTHERS = "others"

    def choose(self, epochs: tuple[int, ...]) -> tuple[int, ...]:
        """Their epochs; the first of ``epochs`` is the leader's."""
        return {Who.ALL: epochs, Who.LEADER: epochs[:1], Who.OTHERS: epochs[1:]}[self]


@dataclass(frozen=True, slots=True)
class Step:
    """What takes place in one state.

    Attributes:
        orders: Sent when it is entered, in this order.
        answer: Awaited; None if none is, or if answers are for single requests.
        by: From these members.
        event: Takes place when all have answered; None if the caller decides.
    """

    orders: tuple[tuple[OrderKind, Who], ...] = ()
    answer: Answer | None = None
    by: Who = Who.ALL
    event: GroupEvent | None = None


STEPS: Mapping[GroupState, Step] = {
    GroupState.PREPARING: Step(((OrderKind.PREPARE, Who.ALL),), Answer.CONFIRMED),
    GroupState.DROPPING: Step(((OrderKind.DROP, Who.ALL),), Answer.DROPPED, event=GroupEvent.DROPPED),
    GroupState.EXCHANGING: Step(event=GroupEvent.EXCHANGED),
    GroupState.SETTLING: Step(((OrderKind.SETTLE, Who.ALL),), Answer.SETTLED, event=GroupEvent.SETTLED),
    GroupState.PIPELINED: Step(((OrderKind.GROW, Who.LEADER),)),
    GroupState.PLANNING: Step(((OrderKind.PLAN, Who.LEADER),), Answer.PLANNED, Who.LEADER, GroupEvent.PLANNED),
    GroupState.SHRINKING: Step(((OrderKind.MOVE, Who.ALL),), Answer.MOVED, event=GroupEvent.MOVED),
    GroupState.FILLING: Step(
        ((OrderKind.COMMIT, Who.LEADER), (OrderKind.FILL, Who.ALL)), Answer.FILLED, event=GroupEvent.FILLED
    ),
    GroupState.HANDOVER: Step(((OrderKind.RETURN, Who.LEADER),), Answer.RETURNED, Who.LEADER, GroupEvent.HANDED_OVER),
    GroupState.RETURNING: Step(((OrderKind.RETURN, Who.OTHERS),), Answer.RETURNED, Who.OTHERS),
    GroupState.ADOPTING: Step(event=GroupEvent.ADOPTED),
    GroupState.CLOSING: Step(((OrderKind.CLOSE, Who.ALL),), Answer.CLOSED, event=GroupEvent.CLOSED),
}
"""Of all states but ``SOLO`` and ``OVER``."""

REQUEST_ANSWERS = {GroupState.EXCHANGING: Answer.FETCHED, GroupState.ADOPTING: Answer.COLLECTED}
"""Answers for single requests. A member's late answer of one of these states cannot be taken for one of the other."""


@dataclass(frozen=True, slots=True)
class Order:
    """One order to one member of a group.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        kind: What to do.
        requests: With which requests, oldest first; by the caller's numbers.
    """

    epoch: int
    number: int
    kind: OrderKind
    requests: tuple[int, ...] = ()
