"""Answers of a group's members to the orders in ``cluster.wire.group_orders``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from floodplain.cluster.wire.group_steps import Answer
from floodplain.core.codec import WireError
from floodplain.core.ranges import HostPort, Line, Port, Positive, Range

Pages = Annotated[int, Range(0, 2**40)]


@dataclass(frozen=True, slots=True)
class KvRow:
    """One request in a member's step loop.

    Attributes:
        ticket: The ticket of its placement there.
        num_tokens: Its known tokens, prompt included.
        num_computed: Leading tokens whose KV the member has.
        num_blocks: Their blocks, whose sources (``core.kv_sources``) are beside the message, row after row.
    """

    ticket: int
    num_tokens: int
    num_computed: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A member is paused, or cannot be in a group. Beside it: the sources of its rows' blocks.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        problem: What to change; None if it can be in the group. The other fields count only then.
        host: The address at which its neighbours reach it, and
        port: where it listens for the stage before.
        bulk_address: ``HOST:PORT`` of its bulk server.
        num_kv_pages: Pages behind its KV pool, over all layers.
        quantum_pages: Pages of a quantum in one layer.
        param_pages: Pages of each layer's parameters.
        quantum_blocks: Blocks of a quantum.
        rows: Its requests, by priority and arrival.
    """

    epoch: int
    number: int
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
class Planned:
    """The leader drained, and planned a shrink. Beside it: (source, destination) pairs of blocks, then freed quanta.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        num_moves: Pairs.
        given_back: Tickets of requests that no longer fit: they are recomputed.
    """

    epoch: int
    number: int
    num_moves: int
    given_back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The leader has left the pipeline. Beside it: the blocks of its rows.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        rows: Its requests, by priority and arrival.
    """

    epoch: int
    number: int
    rows: tuple[KvRow, ...]


@dataclass(frozen=True, slots=True)
class GroupDone:
    """A member has executed an order.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        answer: The answer to that order.
    """

    epoch: int
    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Copied:
    """A member has copied one request's KV, or failed to.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        answer: ``FETCHED`` or ``COLLECTED``.
        request: The router's number of it.
        is_whole: Whether all of it arrived and was verified.
    """

    epoch: int
    number: int
    answer: Answer
    request: int
    is_whole: bool


GroupAnswer = Prepared | Planned | HandedOver | GroupDone | Copied
ANSWERS = (Prepared, Planned, HandedOver, GroupDone, Copied)


def answer_of(message: Prepared | Planned | HandedOver | GroupDone, *, leads: bool) -> Answer:
    """The ``Answer`` of a message.

    Raises:
        WireError: An answer that must have rows has none; or only the leader may send it.
    """
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
