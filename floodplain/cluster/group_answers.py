"""What the members of a group answer the front; see ``cluster.group_orders``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from floodplain.cluster.group_steps import Answer
from floodplain.core.ranges import HostPort, Line, Port, Positive, Range
from floodplain.lending.fields import WireError

Pages = Annotated[int, Range(0, 2**40)]


@dataclass(frozen=True, slots=True)
class KvRow:
    """What a member's step loop has of a request.

    Attributes:
        ticket: Under which it was placed there.
        num_tokens: Its known tokens, prompt included.
        num_computed: Leading tokens whose KV it has.
        num_blocks: Their blocks, whose sources (``core.kv_sources``) lie beside the message, row after row.
    """

    ticket: int
    num_tokens: int
    num_computed: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A member is paused, or says why it cannot be in a group. Beside it: the sources of its rows' blocks.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        problem: What to change; None if it can be in the group, and the rest counts.
        host: Where its neighbours reach it, and
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
    """The leader waits. Beside it: sources and destinations of moved blocks, pair by pair, then quanta that go.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        num_moves: Pairs.
        given_back: Tickets of requests that there was no room for: they are computed again.
    """

    epoch: int
    number: int
    num_moves: int
    given_back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The leader has left the pipeline. Beside it: blocks of its rows.

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
    """A member has done what it was told.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        answer: What.
    """

    epoch: int
    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Copied:
    """A member has copied one request's KV, or has failed to.

    Attributes:
        epoch: Of the member.
        number: Of the group.
        answer: ``FETCHED`` or ``COLLECTED``.
        request: The front's number of it.
        is_whole: Whether all of it is there, and was proven whole.
    """

    epoch: int
    number: int
    answer: Answer
    request: int
    is_whole: bool


GroupAnswer = Prepared | Planned | HandedOver | GroupDone | Copied
ANSWERS = (Prepared, Planned, HandedOver, GroupDone, Copied)


def answer_of(message: Prepared | Planned | HandedOver | GroupDone, *, leads: bool) -> Answer:
    """What a member says that it has done.

    Raises:
        WireError: Such an answer has rows, and these are missing; or it is the leader's.
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
