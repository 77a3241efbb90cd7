"""Orders of the router to the members of a group, their answers, and which are due in each state. No I/O, no clock.

A group's number is used once: a message of an ended group changes nothing. Integers beside a message (blocks, quanta)
are the frame's 32-bit ids, in the order given here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, TypeVar

from floodplain.cluster.wire.placements import Submit
from floodplain.core.codec import WireError
from floodplain.core.groups import GroupEvent, GroupState
from floodplain.core.ranges import HostPort, Line, Port, Positive, Range, Secret


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


@dataclass(frozen=True, slots=True)
class Numbered:
    """A message to or from the instance ``epoch``, about the group, migration or pipeline ``number``."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Prepare(Numbered):
    """Pause at a step boundary, and report what is held. Answered by ``Prepared``."""


@dataclass(frozen=True, slots=True)
class Cancel(Numbered):
    """The group is not formed: resume."""


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request whose KV, at the member ``place``, moves with a group; its block ids are beside the message."""

    request: int
    place: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Drop(Numbered):
    """Drop layers, map the group's pool, link up. Answered by ``GroupDone``. Beside it: used quanta, then blocks.

    A member of a group that is taken in drops some of its remaining layers, and leaves its old pipeline.

    Attributes:
        place: Of the member in the pipeline, from 0.
        first_layer: The member keeps layers from here up to ``end_layer``, exclusive.
        num_used: Used quanta of its own pool, or of its old group; the k-th becomes quantum ``first_quantum + k``.
        max_model_len: Most tokens of a request: what one instance can hold, so that one member can resume it alone.
        secret: The secret that members show each other, hexadecimal.
        host: Where the next member listens, on ``port``.
        held: For the leader: requests whose blocks are reserved, by the group's ids; for others empty.
    """

    place: int
    num_members: int
    first_layer: int
    end_layer: int
    num_used: int
    first_quantum: int
    num_quanta: int
    max_model_len: int
    secret: Secret
    host: Line
    port: Port
    held: tuple[HeldRequest, ...]


@dataclass(frozen=True, slots=True)
class Fetch(Numbered):
    """Copy these requests' KV, in the kept layers, from their places. Answered by ``Copied`` for each.

    Beside it: their blocks by the group's ids, then the source of each (``core.tiers``): the same block at the
    request's place, or a slot of that member's swap space. For its own requests a member copies slots only.
    ``addresses`` are bulk servers by place; ``sources`` has, for each place and layer of the model, the place that has
    this layer's KV of the place's requests.
    """

    addresses: tuple[HostPort, ...]
    sources: tuple[tuple[int, ...], ...]
    held: tuple[HeldRequest, ...]


@dataclass(frozen=True, slots=True)
class Adopt(Numbered):
    """Resume a request; KV of ``num_computed`` leading tokens is there. Its tokens are beside the message."""

    request: int
    num_computed: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class Release(Numbered):
    """Free the blocks that are reserved for a request; no member writes to them any more."""

    request: int


@dataclass(frozen=True, slots=True)
class Settle(Numbered):
    """Unmap KV of dropped layers, and map ``num_quanta`` quanta. Answered by ``GroupDone``."""

    num_quanta: int


@dataclass(frozen=True, slots=True)
class Grow(Numbered):
    """All members have ``num_quanta`` quanta: add their blocks to the leader's ledger."""

    num_quanta: int


@dataclass(frozen=True, slots=True)
class Plan(Numbered):
    """Drain the pipeline, and plan to shrink it to ``num_quanta`` quanta. Answered by ``Planned``."""

    num_quanta: int


@dataclass(frozen=True, slots=True)
class Move(Numbered):
    """Move blocks and unmap quanta, as in ``Planned``. Answered by ``GroupDone``."""

    num_moves: int


@dataclass(frozen=True, slots=True)
class Commit(Numbered):
    """All members have moved their blocks: the leader resumes."""


@dataclass(frozen=True, slots=True)
class Fill(Numbered):
    """Map and fill dropped layers, each from the bulk server in ``addresses``. Answered by ``GroupDone``."""

    addresses: tuple[HostPort, ...]


@dataclass(frozen=True, slots=True)
class Return(Numbered):
    """Leave the pipeline and serve alone. The leader answers ``HandedOver``, others ``GroupDone``.

    Beside it, except for the leader: the group's quanta that hold KV of requests; all others are unmapped.
    """


@dataclass(frozen=True, slots=True)
class Collect(Numbered):
    """Copy these requests' KV, in all layers, to the own pool. Answered by ``Copied`` for each. Beside it: blocks.

    ``addresses`` has, for each layer of the model, the bulk server of the member with its KV.
    """

    addresses: tuple[HostPort, ...]
    held: tuple[HeldRequest, ...]


@dataclass(frozen=True, slots=True)
class Close(Numbered):
    """Unmap the group's KV, grow the own pool to its size before the group. Answered by ``GroupDone``."""


GroupOrder = (
    Prepare | Cancel | Drop | Fetch | Adopt | Release | Settle | Grow | Plan | Move | Commit | Fill | Return | Collect
    | Close
)  # fmt: skip


Pages = Annotated[int, Range(0, 2**40)]


@dataclass(frozen=True, slots=True)
class KvRow:
    """One request in a member's step loop. The KV of ``num_computed`` leading tokens is in ``num_blocks`` blocks.

    The sources of the blocks (``core.tiers``) are beside the message, row after row.
    """

    ticket: int
    num_tokens: int
    num_computed: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Prepared(Numbered):
    """A member is paused, or cannot be in a group. Beside it: the sources of its rows' blocks.

    Attributes:
        problem: What to change; None if it can be in the group. The other fields count only then.
        host: Where it listens for the stage before, on ``port``.
        num_kv_pages: Pages behind its KV pool, over all layers.
        quantum_pages: Pages of a quantum in one layer.
        param_pages: Pages of each layer's parameters.
        rows: Its requests, by priority and arrival.
    """

    problem: Line | None
    host: Line
    port: Port
    bulk_address: HostPort
    num_kv_pages: Pages
    quantum_pages: Positive
    param_pages: tuple[Pages, ...]
    quantum_blocks: Positive
    rows: tuple[KvRow, ...]


@dataclass(frozen=True, slots=True)
class Planned(Numbered):
    """The leader drained, and planned a shrink. Beside it: (source, destination) pairs of blocks, then freed quanta.

    ``given_back`` has tickets of requests that no longer fit: they are recomputed.
    """

    num_moves: int
    given_back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandedOver(Numbered):
    """The leader has left the pipeline; its requests, by priority and arrival. Beside it: the blocks of its rows."""

    rows: tuple[KvRow, ...]


@dataclass(frozen=True, slots=True)
class GroupDone(Numbered):
    """A member has executed the order with this ``answer``."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Copied(Numbered):
    """A member has copied one request's KV; not ``is_whole``: some did not arrive, or was damaged."""

    answer: Answer
    request: int
    is_whole: bool


Row = TypeVar("Row", HeldRequest, KvRow)


def split_blocks(rows: Sequence[Row], integers: Sequence[int]) -> list[tuple[Row, tuple[int, ...]]]:
    """Each row with its blocks, or their sources, which lie beside the message row after row."""
    ends = accumulate(row.num_blocks for row in rows)
    return [(row, tuple(integers[end - row.num_blocks : end])) for row, end in zip(rows, ends, strict=True)]


GroupAnswer = Prepared | Planned | HandedOver | GroupDone | Copied


def answer_of(message: Prepared | Planned | HandedOver | GroupDone, *, leads: bool) -> Answer:
    """The ``Answer`` of a message. Raises ``WireError`` if it lacks its rows, or only the leader may send it."""
    match message:
        case Prepared():
            return Answer.CONFIRMED
        case Planned():
            return Answer.PLANNED
        case HandedOver():
            if not leads:
                raise WireError("it hands over what it does not lead")
            return Answer.RETURNED
    if message.answer in (Answer.CONFIRMED, Answer.PLANNED) or (message.answer is Answer.RETURNED and leads):
        raise WireError("it does not say what it has")
    return message.answer


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

    orders: tuple[tuple[type[GroupOrder], Who], ...] = ()
    answer: Answer | None = None
    by: Who = Who.ALL
    event: GroupEvent | None = None


STEPS: Mapping[GroupState, Step] = {
    GroupState.PREPARING: Step(((Prepare, Who.ALL),), Answer.CONFIRMED),
    GroupState.DROPPING: Step(((Drop, Who.ALL),), Answer.DROPPED, event=GroupEvent.DROPPED),
    GroupState.EXCHANGING: Step(event=GroupEvent.EXCHANGED),
    GroupState.SETTLING: Step(((Settle, Who.ALL),), Answer.SETTLED, event=GroupEvent.SETTLED),
    GroupState.PIPELINED: Step(((Grow, Who.LEADER),)),
    GroupState.PLANNING: Step(((Plan, Who.LEADER),), Answer.PLANNED, Who.LEADER, GroupEvent.PLANNED),
    GroupState.SHRINKING: Step(((Move, Who.ALL),), Answer.MOVED, event=GroupEvent.MOVED),
    GroupState.FILLING: Step(((Commit, Who.LEADER), (Fill, Who.ALL)), Answer.FILLED, event=GroupEvent.FILLED),
    GroupState.HANDOVER: Step(((Return, Who.LEADER),), Answer.RETURNED, Who.LEADER, GroupEvent.HANDED_OVER),
    GroupState.RETURNING: Step(((Return, Who.OTHERS),), Answer.RETURNED, Who.OTHERS),
    GroupState.ADOPTING: Step(event=GroupEvent.ADOPTED),
    GroupState.CLOSING: Step(((Close, Who.ALL),), Answer.CLOSED, event=GroupEvent.CLOSED),
}
"""The steps of all states except ``SOLO`` and ``OVER``."""

REQUEST_ANSWERS = {GroupState.EXCHANGING: Answer.FETCHED, GroupState.ADOPTING: Answer.COLLECTED}
"""Answers for single requests. They differ, so a late answer of one state is never taken for one of the other."""


@dataclass(frozen=True, slots=True)
class Order:
    """One order to one member of a group, about ``requests``, oldest first, by the caller's numbers."""

    epoch: int
    number: int
    kind: type[GroupOrder]
    requests: tuple[int, ...] = ()
