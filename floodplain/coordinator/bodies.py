"""Pydantic models of the API's bodies, derived from the dataclasses of messages and answers.

FastAPI documents the models, and validates messages by them, within the bounds of their fields. An answer's model only
documents: ``lending.wire`` encodes answers, always with all fields.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from floodplain.core.ranges import Length, OneOf, Pattern, Range
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Shard
from floodplain.leases.states import NAME, Lease, Stamp
from floodplain.lending.wire import EncodedAnswer, EncodedReply, News
from floodplain.web.bodies import BoundedModel

MAX_MESSAGES = 1024
MAX_WAIT_S = 60.0
"""For news; proxies and firewalls cut longer silences."""
_NAME_TEXT = "Of a member: of its device."

_MODEL_NAMES = {
    **{kind: f"{kind.__name__}Message" for kind in get_args(Message)},
    Stamp: "StampPart",
    Shard: "ShardPart",
    Member: "MemberRow",
    Lease: "LeaseRow",
    EncodedReply: "ReplyBody",
    EncodedAnswer: "ReplyBatch",
    News: "NewsBody",
}
"""Names in ``/openapi.json``, where they differ from the dataclass's."""


class _Body(BoundedModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# -- answers -----------------------------------------------------------------------------------------------------------


@cache
def answer_model(kind: Any) -> type[BaseModel]:
    """The model of an answer: all fields of the dataclass, without bounds; described ones may be absent."""
    hints = get_type_hints(kind)
    defaults = {
        item.name: Field(item.default, description=item.metadata["description"]) if item.metadata else ...
        for item in fields(kind)
    }
    return _make_model(kind, {name: (_answer_type(hints[name]), default) for name, default in defaults.items()})


def _answer_type(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_answer_type(part) for part in arguments)]  # noqa: UP007 - the parts are computed
    if origin is tuple:
        return list[_answer_type(arguments[0])]  # type: ignore[misc]
    if origin is Mapping:
        return dict[arguments]  # type: ignore[misc, valid-type]
    return answer_model(cast(Any, hint)) if is_dataclass(hint) else hint


def _make_model(kind: Any, parts: Mapping[str, Any]) -> type[BaseModel]:
    summary = inspect.cleandoc(kind.__doc__).partition("\n\n")[0]
    name = _MODEL_NAMES.get(kind, kind.__name__)
    model: type[BaseModel] = create_model(name, __base__=_Body, __doc__=summary, **parts)
    return model


# -- messages ----------------------------------------------------------------------------------------------------------


@cache
def _message_type(kind: Any) -> Any:
    """The type that pydantic validates as the model of a dataclass, and turns into that dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    tag = {"kind": (Literal[kind.__name__.lower()], ...)} if kind in get_args(Message) else {}
    parts = {
        item.name: (_field_type(hints[item.name], ()), ... if item.default is MISSING else item.default)
        for item in fields(kind)
    }
    values_of = attrgetter(*parts)
    return Annotated[_make_model(kind, tag | parts), AfterValidator(lambda model: kind(*values_of(model)))]


def _field_type(hint: Any, bounds: tuple[Any, ...]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _field_type(arguments[0], (*bounds, *arguments[1:]))
    if origin in (Union, types.UnionType):
        return Union[tuple(_field_type(part, bounds) for part in arguments)]  # noqa: UP007 - the parts are computed
    if is_dataclass(hint):
        return _message_type(cast(Any, hint))
    for bound in bounds:
        if isinstance(bound, OneOf):
            return Annotated[Literal[bound.values], AfterValidator(hint)]
    limits = tuple(_limit(bound, hint) for bound in bounds)
    if origin is tuple:
        return Annotated[(list[_field_type(arguments[0], ())], *limits, AfterValidator(tuple))]  # type: ignore[misc]
    return Annotated[(hint, *limits)] if limits else hint


def _limit(bound: Any, hint: Any) -> Any:
    match bound:
        case Pattern(expression):
            return Field(pattern=f"^{expression}$", description=_NAME_TEXT if bound == NAME else None)
        case Range(least, most):
            return Field(ge=least, lt=most + 1) if hint is int else Field(ge=least, le=most)
        case Length(most, least):
            return Field(min_length=least, max_length=most)
    raise TypeError(f"{bound} has no equivalent")


if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = Annotated[Union[tuple(map(_message_type, get_args(Message)))], Field(discriminator="kind")]  # noqa: UP007
Name = Annotated[str, _limit(NAME, str)]


class MessageBatch(_Body):
    """Messages, handled in their order and committed together."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


# -- the rest of the API -----------------------------------------------------------------------------------------------


class NewsQuery(BaseModel):
    """The member whose news to wait for, and for how long."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    member: Name
    mark: Annotated[str, Field(max_length=64, description="Of the last answer; empty the first time.")] = ""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="Seconds, at most.")] = 20.0


class ServiceHealth(BaseModel):
    """Whether this coordinator leads; one that stands by takes over when the leader ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Literal["ok"] = "ok"
    role: Literal["leading", "standing by"]
    leader_url: str
