"""What the front and its instances say to each other.

The first message of a connection is an instance's ``Hello``; the front answers ``Welcome`` or ``Denied``. From then on
every message carries the epoch that the welcome gave, and one of another epoch counts for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

from floodplain.cluster.codec import from_json, to_json
from floodplain.cluster.facts import InstanceFacts, StageFacts
from floodplain.cluster.frames import pack_frame
from floodplain.cluster.group_answers import ANSWERS, GroupAnswer
from floodplain.cluster.group_orders import ORDERS, GroupOrder
from floodplain.cluster.migration_messages import (
    MIGRATION_ANSWERS,
    MIGRATION_ORDERS,
    MigrationAnswer,
    MigrationOrder,
)
from floodplain.cluster.placements import Submit
from floodplain.core.errors import QueueFull, RequestRefused, ShuttingDown, UserError
from floodplain.core.plan import TokenLogprobs
from floodplain.core.ranges import MAX_COUNT, MAX_TOKEN_ID, Line, OneOf, Port, Positive, Range, Secret, TokenId
from floodplain.engine.outputs import EngineStats
from floodplain.engine.step_meter import NO_PROGRESS, Progress
from floodplain.lending.fields import WireError


@dataclass(frozen=True, slots=True)
class Hello:
    """An instance dials in.

    Attributes:
        token: The secret that the front gave out.
        facts: What it is.
        stage: None if it needs no other instance.
        can_drop: Whether it may be a member of a group that drops layers.
        can_move: Whether running requests may move to it, and from it, with their KV.
    """

    token: str
    facts: InstanceFacts
    stage: StageFacts | None = None
    can_drop: bool = False
    can_move: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """A life begins: ``epoch`` names it. Both sides speak every ``beat_s``; the front waits ``silence_s`` at most."""

    epoch: int
    beat_s: Annotated[float, Range(0.001, 3600.0)]
    silence_s: Annotated[float, Range(0.001, 3600.0)]

    def __post_init__(self) -> None:
        if self.silence_s < self.beat_s:
            raise UserError(f"a silence of {self.silence_s:g} s is shorter than a beat of {self.beat_s:g} s")


@dataclass(frozen=True, slots=True)
class Denied:
    """The front does not take the instance: ``reason`` says what to change."""

    reason: Line


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants the request under this ticket any more."""

    epoch: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Form:
    """All stages of a pipeline are there: link up. The instance answers ``Formed``, or ends this life.

    Attributes:
        epoch: Of the instance.
        number: Of the pipeline; no other one ever has it.
        secret: That its members show each other, hexadecimal.
        num_blocks: KV blocks that all members have.
        max_model_len: Tokens of a request for which all have room.
        host: Where the next stage listens (of the last one: the first), and
        port: on which port.
    """

    epoch: int
    number: int
    secret: Secret
    num_blocks: Positive
    max_model_len: Positive
    host: Line
    port: Port


@dataclass(frozen=True, slots=True)
class FrontBeat:
    """The front is there."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TokenRow:
    """What a request gained in a step; see ``OutputDelta``. ``token`` is None where it ended without one."""

    ticket: int
    token: TokenId | None
    finish_reason: Annotated[str, OneOf(("stop", "length"))] | None
    num_cached_tokens: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the requests of an instance gained."""

    epoch: int
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The instance has taken a request, which may wait there."""

    epoch: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The instance does not take a request: ``why`` is one of ``REFUSALS``, and the rest is the error's."""

    epoch: int
    ticket: int
    why: Annotated[str, OneOf(("full", "stopping", "refused", "invalid"))]
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class Beat:
    """The instance is there, and this is how it is, and how it gets on."""

    epoch: int
    stats: EngineStats
    progress: Progress = NO_PROGRESS


@dataclass(frozen=True, slots=True)
class Leaving:
    """The instance takes nothing more, and exits when its requests have ended."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Formed:
    """A stage is linked with its neighbours in the pipeline of this number."""

    epoch: int
    number: int


FrontMessage = Welcome | Denied | Submit | Abort | Form | FrontBeat | GroupOrder | MigrationOrder
EpochMessage = Tokens | Accepted | Refused | Beat | Leaving | Formed | GroupAnswer | MigrationAnswer
InstanceMessage = Hello | EpochMessage
_FROM_FRONT = {
    kind.__name__: kind for kind in (Welcome, Denied, Submit, Abort, Form, FrontBeat, *ORDERS, *MIGRATION_ORDERS)
}
_FROM_INSTANCE = {
    kind.__name__: kind
    for kind in (Hello, Tokens, Accepted, Refused, Beat, Leaving, Formed, *ANSWERS, *MIGRATION_ANSWERS)
}
REFUSALS: Mapping[str, type[UserError]] = {
    "full": QueueFull,
    "stopping": ShuttingDown,
    "refused": RequestRefused,
    "invalid": UserError,
}


def pack(message: FrontMessage | InstanceMessage, token_ids: tuple[int, ...] = ()) -> bytes:
    """A message as a frame."""
    kind = type(message).__name__
    if isinstance(message, Tokens):  # the one that is sent in every step
        return pack_frame({"kind": kind, "epoch": message.epoch, "rows": [_pack_row(row) for row in message.rows]})
    return pack_frame({"kind": kind} | to_json(message), token_ids)


def read_front_message(body: dict[str, object]) -> FrontMessage:
    """What the front said.

    Raises:
        WireError: It is no message of this version.
    """
    message: FrontMessage = _read(body, _FROM_FRONT)
    return message


def read_instance_message(body: dict[str, object]) -> InstanceMessage:
    """What an instance said.

    Raises:
        WireError: It is no message of this version.
    """
    if body.get("kind") == Tokens.__name__:
        epoch, rows = body.get("epoch"), body.get("rows")
        if len(body) != 3 or not _is_count(epoch, MAX_COUNT) or not isinstance(rows, list):
            raise WireError("Tokens has not its fields")
        return Tokens(epoch, tuple([_read_row(row) for row in rows]))
    message: InstanceMessage = _read(body, _FROM_INSTANCE)
    return message


def _pack_row(row: TokenRow) -> list[object]:
    logprobs = None if row.logprobs is None else to_json(row.logprobs)
    return [row.ticket, row.token, row.finish_reason, row.num_cached_tokens, logprobs]


def _read_row(row: object) -> TokenRow:
    """By hand, since each token of each request passes here."""
    if not isinstance(row, list) or len(row) != len(TokenRow.__slots__):
        raise WireError("a row of Tokens has not its fields")
    ticket, token, reason, num_cached, logprobs = row
    if (
        not (_is_count(ticket, MAX_COUNT) and _is_count(num_cached, MAX_COUNT))
        or not (token is None or _is_count(token, MAX_TOKEN_ID))
        or not (reason is None or reason == "stop" or reason == "length")
    ):
        raise WireError("a row of Tokens has a value out of its range")
    scores = None if logprobs is None else from_json(TokenLogprobs, logprobs)
    return TokenRow(ticket, token, reason, num_cached, scores)


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= most


def _read(body: dict[str, object], kinds: Mapping[str, type[Any]]) -> Any:
    kind = body.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise WireError("a frame is no message of this version")
    return from_json(kinds[kind], body)


def refusal_of(error: UserError, epoch: int, ticket: int) -> Refused:
    """What an instance says of a request that it does not take."""
    why = next(name for name, cls in REFUSALS.items() if isinstance(error, cls))
    field = error.field if isinstance(error, RequestRefused) else None
    return Refused(epoch, ticket, why, str(error), field)


def error_of(message: Refused) -> UserError:
    """The same as an exception again."""
    if message.why == "refused":
        return RequestRefused(message.message, message.field)
    return REFUSALS.get(message.why, UserError)(message.message)
