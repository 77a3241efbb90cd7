"""Messages between the router and its instances.

The first message of a connection is an instance's ``Hello``; the router answers ``Welcome`` or ``Denied``. From then on
every message carries the epoch that the welcome gave; a message of another epoch is ignored.

Of a migration (``cluster.migration.table`` has the protocol) a number is used once. Block ids are beside a message, 32
bits each; secrets are hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard, get_args

from floodplain.cluster.wire.frames import CONTROL
from floodplain.cluster.wire.group_messages import GroupAnswer, GroupOrder, Numbered
from floodplain.cluster.wire.placements import Submit
from floodplain.core.codec import WireError, from_json, to_json
from floodplain.core.errors import QueueFull, RequestRefused, ShuttingDown, UserError
from floodplain.core.plan import PromptLogprobs, TokenLogprobs
from floodplain.core.ranges import (
    MAX_COUNT,
    MAX_TOKEN_ID,
    HostPort,
    Line,
    OneOf,
    Port,
    Positive,
    Range,
    Secret,
    TokenId,
)
from floodplain.engine.outputs import EngineStats
from floodplain.engine.step_meter import NO_PROGRESS, Progress


@dataclass(frozen=True, slots=True)
class HoldKv(Numbered):
    """To the source: hold the request's sealed blocks, and let the target read them. Answered by ``KvHeld``.

    The target has ``num_copied`` leading blocks, and will show ``secret``.
    """

    ticket: int
    num_copied: int
    secret: Secret


@dataclass(frozen=True, slots=True)
class PullKv(Numbered):
    """To the target: copy the blocks beside the message from the source's bulk server. Answered by ``KvPulled``."""

    address: HostPort
    secret: Secret


@dataclass(frozen=True, slots=True)
class StopRequest(Numbered):
    """To the source: end the request, and hold its blocks after ``num_copied``. Answered by ``RequestStopped``."""

    num_copied: int


@dataclass(frozen=True, slots=True)
class GoOn(Numbered):
    """To source or target: resume the request from the KV of ``num_computed`` tokens. All its tokens are beside this.

    The migration ends for this instance.
    """

    num_computed: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class ReleaseKv(Numbered):
    """To source or target: free the blocks that are still held or reserved; the migration ends for it."""


@dataclass(frozen=True, slots=True)
class KvHeld(Numbered):
    """The source holds blocks, if the request runs; those that the target lacks are beside the message."""

    is_running: bool
    address: HostPort


@dataclass(frozen=True, slots=True)
class KvPulled(Numbered):
    """The target has copied blocks; not ``is_whole``: some did not arrive, or were damaged."""

    is_whole: bool


@dataclass(frozen=True, slots=True)
class RequestStopped(Numbered):
    """The source has ended the request; blocks that the target lacks are beside the message.

    Not ``is_stopped``: it had ended or does not run, and its placement does not change. Its ``num_tokens`` known
    tokens, prompt included, were sent to the router before; the KV of ``num_computed`` leading ones is held.
    """

    is_stopped: bool
    num_tokens: int
    num_computed: int


MigrationOrder = HoldKv | PullKv | StopRequest | GoOn | ReleaseKv
MigrationAnswer = KvHeld | KvPulled | RequestStopped


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """The facts of one instance. ``max_model_len`` is in tokens, ``host`` the machine's name."""

    version: Line
    fingerprint: Line
    dtype: Line
    max_model_len: Positive
    block_tokens: Positive
    num_blocks: Positive
    host: Line
    pid: Positive


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The facts of an instance that is stage ``stage`` of ``num_stages``, from 0; it listens for the stage before."""

    stage: Annotated[int, Range(0, 255)]
    num_stages: Annotated[int, Range(2, 256)]
    host: Line
    port: Port


def find_difference(first: InstanceFacts, other: InstanceFacts) -> str | None:
    """Why ``other`` cannot serve beside ``first``, and what to change; None if it can."""
    if other.version != first.version:
        return f"it is Floodplain {other.version}, and the others are {first.version}: install the same"
    for name, flag in (("dtype", "--dtype"), ("block_tokens", "--block-tokens")):
        mine, theirs = getattr(other, name), getattr(first, name)
        if mine != theirs:
            return f"{flag} {mine} is not the others' {theirs}: start it with {flag} {theirs}"
    if other.fingerprint != first.fingerprint:
        return "its model is not the others': give it the same weights, the same --seed if it is a dummy, and --device"
    if other.max_model_len < first.max_model_len:
        mine, theirs = other.max_model_len, first.max_model_len
        return f"it serves {mine} tokens a request, and the others {theirs}: give it more --kv-memory"
    return None


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of an instance, which ``token`` admits; other fields are as in ``state.roster.Instance``."""

    token: str
    facts: InstanceFacts
    stage: StageFacts | None = None
    can_drop: bool = False
    can_move: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """A session begins, named by ``epoch``. Both sides send every ``beat_s``; the router waits ``silence_s``."""

    epoch: int
    beat_s: Annotated[float, Range(0.001, 3600.0)]
    silence_s: Annotated[float, Range(0.001, 3600.0)]

    def __post_init__(self) -> None:
        if self.silence_s < self.beat_s:
            raise UserError(f"a silence of {self.silence_s:g} s is shorter than a beat of {self.beat_s:g} s")


@dataclass(frozen=True, slots=True)
class Denied:
    """The router refuses the instance; ``reason`` says what to change."""

    reason: Line


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the request of this ticket."""

    epoch: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Form(Numbered):
    """All stages of a pipeline have joined: open the links. The instance answers ``Formed``, or ends this session.

    Attributes:
        secret: The secret that its members show each other, hexadecimal.
        num_blocks: KV blocks that all members have.
        max_model_len: Most tokens of a request for which all members have room.
        host: Where the next stage listens (for the last stage: the first), on ``port``.
    """

    secret: Secret
    num_blocks: Positive
    max_model_len: Positive
    host: Line
    port: Port


@dataclass(frozen=True, slots=True)
class FrontBeat:
    """The router is alive."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One request's result of a step; see ``OutputDelta``. ``token`` is None where the request ended without one."""

    ticket: int
    token: TokenId | None
    finish_reason: Annotated[str, OneOf(("stop", "length"))] | None
    num_cached_tokens: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The results of an instance's requests."""

    epoch: int
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The instance has accepted a request, which may still wait there."""

    epoch: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The instance refuses a request: ``why`` is one of ``REFUSALS``, the other fields are the error's."""

    epoch: int
    ticket: int
    why: Annotated[str, OneOf(("full", "stopping", "refused", "invalid"))]
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class Beat:
    """The instance is alive; its statistics and the progress of its steps."""

    epoch: int
    stats: EngineStats
    progress: Progress = NO_PROGRESS


@dataclass(frozen=True, slots=True)
class Leaving:
    """The instance accepts nothing more, and exits when its requests have ended."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Formed(Numbered):
    """A stage is linked with both neighbours in its pipeline."""


RouterMessage = Welcome | Denied | Submit | Abort | Form | FrontBeat | GroupOrder | MigrationOrder
EpochMessage = Tokens | Accepted | Refused | Beat | Leaving | Formed | GroupAnswer | MigrationAnswer
InstanceMessage = Hello | EpochMessage
_FROM_ROUTER = {kind.__name__: kind for kind in get_args(RouterMessage)}
_FROM_INSTANCE = {kind.__name__: kind for kind in get_args(InstanceMessage)}
REFUSALS: Mapping[str, type[UserError]] = {
    "full": QueueFull,
    "stopping": ShuttingDown,
    "refused": RequestRefused,
    "invalid": UserError,
}


def pack(message: RouterMessage | InstanceMessage, token_ids: tuple[int, ...] = ()) -> bytes:
    """The frame of a message."""
    kind = type(message).__name__
    if isinstance(message, Tokens):  # sent in every step, so packed without ``to_json``
        return CONTROL.pack(
            {"kind": kind, "epoch": message.epoch, "rows": [_pack_row(row) for row in message.rows]}, ()
        )
    return CONTROL.pack({"kind": kind} | to_json(message), token_ids)


def read_router_message(body: dict[str, object]) -> RouterMessage:
    """The message of the router in a frame. Raises ``WireError`` if it is none of this version."""
    message: RouterMessage = _read(body, _FROM_ROUTER)
    return message


def read_instance_message(body: dict[str, object]) -> InstanceMessage:
    """The message of an instance in a frame. Raises ``WireError`` if it is none of this version."""
    if body.get("kind") == Tokens.__name__:
        epoch, rows = body.get("epoch"), body.get("rows")
        if len(body) != 3 or not _is_count(epoch, MAX_COUNT) or not isinstance(rows, list):
            raise WireError("Tokens has not its fields")
        return Tokens(epoch, tuple([_read_row(row) for row in rows]))
    message: InstanceMessage = _read(body, _FROM_INSTANCE)
    return message


def _pack_row(row: TokenRow) -> list[object]:
    logprobs = None if row.logprobs is None else to_json(row.logprobs)
    scores = None if row.prompt_logprobs is None else [to_json(one) for one in row.prompt_logprobs]
    return [row.ticket, row.token, row.finish_reason, row.num_cached_tokens, logprobs, scores]


def _read_row(row: object) -> TokenRow:
    """A row of ``Tokens``. Read by hand for speed: every token of every request passes here."""
    if not isinstance(row, list) or len(row) != len(TokenRow.__slots__):
        raise WireError("a row of Tokens has not its fields")
    ticket, token, reason, num_cached, logprobs, of_prompt = row
    if (
        not (_is_count(ticket, MAX_COUNT) and _is_count(num_cached, MAX_COUNT))
        or not (token is None or _is_count(token, MAX_TOKEN_ID))
        or not (reason is None or reason == "stop" or reason == "length")
        or not (of_prompt is None or isinstance(of_prompt, list))
    ):
        raise WireError("a row of Tokens has a value out of its range")
    scores = None if logprobs is None else from_json(TokenLogprobs, logprobs)
    whole = None if of_prompt is None else tuple([from_json(TokenLogprobs, one) for one in of_prompt])
    return TokenRow(ticket, token, reason, num_cached, scores, whole)


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= most


def _read(body: dict[str, object], kinds: Mapping[str, type[Any]]) -> Any:
    kind = body.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise WireError("a frame is no message of this version")
    return from_json(kinds[kind], body)


def refusal_of(error: UserError, epoch: int, ticket: int) -> Refused:
    """The message by which an instance refuses a request because of ``error``."""
    why = next(name for name, cls in REFUSALS.items() if isinstance(error, cls))
    field = error.field if isinstance(error, RequestRefused) else None
    return Refused(epoch, ticket, why, str(error), field)


def error_of(message: Refused) -> UserError:
    """The exception of a refusal."""
    if message.why == "refused":
        return RequestRefused(message.message, message.field)
    return REFUSALS.get(message.why, UserError)(message.message)
