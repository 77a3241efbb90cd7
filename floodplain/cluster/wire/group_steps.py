"""The orders to members of a group and their answers, by state. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from floodplain.core.groups import GroupEvent, GroupState


class OrderKind(StrEnum):
    """The kinds of orders to a member: the messages of the same names in ``group_messages`` say what they order."""

    PREPARE = "prepare"
    CANCEL = "cancel"
    DROP = "drop"
    FETCH = "fetch"
    ADOPT = "adopt"
    RELEASE = "release"
    SETTLE = "settle"
    GROW = "grow"
    PLAN = "plan"
    MOVE = "move"
    COMMIT = "commit"
    FILL = "fill"
    RETURN = "return"
    COLLECT = "collect"
    CLOSE = "close"


class Answer(StrEnum):
    """A member's answer when it has executed an order."""

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
        """The epochs of these members; the first of ``epochs`` is the leader's."""
        return {Who.ALL: epochs, Who.LEADER: epochs[:1], Who.OTHERS: epochs[1:]}[self]


@dataclass(frozen=True, slots=True)
class Step:
    """The orders and answers of one state.

    Attributes:
        orders: Sent when the state is entered, in this sequence.
        answer: The awaited answer; None if there is none, or if answers are for single requests.
        by: The members that must answer.
        event: Follows when all have answered; None if the caller decides.
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
"""The steps of all states except ``SOLO`` and ``OVER``."""

REQUEST_ANSWERS = {GroupState.EXCHANGING: Answer.FETCHED, GroupState.ADOPTING: Answer.COLLECTED}
"""Answers for single requests. They differ, so a late answer of one state is never taken for one of the other."""


@dataclass(frozen=True, slots=True)
class Order:
    """One order to one member of a group, about ``requests``, oldest first, by the caller's numbers."""

    epoch: int
    number: int
    kind: OrderKind
    requests: tuple[int, ...] = ()
