"""Frozen dataclasses as JSON values and back. A value that does not fit its field's annotation is a ``WireError``.

Supported are int, float, str, bool, string enums, ``X | None``, ``tuple[X, ...]``, ``tuple[X, Y]``, dataclasses, and
mappings by strings or by tuples of strings; the latter become lists, since JSON's keys are strings. All are bounded: by
``Annotated`` (``core.ranges``), else by the default bounds of the type (``_BOUNDS``).

Versions: between processes of one version an object has all fields of its dataclass and no others. In an *open* object
unknown fields are ignored, and fields that older versions lack (``ranges.ADDED``) take their defaults.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from floodplain.core import ranges
from floodplain.core.errors import UserError

T = TypeVar("T")

_BOUNDS: Mapping[Any, tuple[Any, ...]] = {
    int: (ranges.COUNT,),
    float: (ranges.SECONDS,),
    str: (ranges.NAME,),
    tuple: (ranges.ITEMS,),
    dict: (ranges.ENTRIES,),
    Mapping: (ranges.ENTRIES,),
}
_JSON_NAMES: Mapping[type, str] = {list: "list", dict: "object"}


class WireError(ValueError):
    """A value that no process of this version sends. The message names the field, and shows no value."""


def to_json(value: Any) -> dict[str, Any]:
    """The JSON object of a dataclass, as ``json.dumps`` takes it."""
    return {
        name: getattr(value, name) if write is None else write(getattr(value, name))
        for name, write in _writers(value.__class__)
    }


def from_json(kind: type[T], value: object, where: str | None = None, *, is_open: bool = False) -> T:
    """The dataclass of type ``kind`` in a JSON value; WireError if it is not a valid one.

    Errors begin with ``where``, else with the name of ``kind``. ``is_open``: the sender may be of another version.
    """
    try:
        result: T = _dataclass_reader(cast(Any, kind), is_open)(value)
    except WireError as error:
        raise WireError(f"{where or kind.__name__}{error}") from None
    return result


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


# -- writing -----------------------------------------------------------------------------------------------------------


@cache
def _writers(kind: Any) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    return tuple((item.name, _writer(_hints(kind)[item.name])) for item in fields(kind))


def _writer(hint: Any) -> Callable[[Any], Any] | None:
    """The function that turns a value of a type into its JSON value; None if it is one already."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _writer(arguments[0])
    if origin in (Union, types.UnionType):
        inner = _writer(_without_none(arguments))
        return inner and (lambda value: None if value is None else inner(value))
    if is_dataclass(hint):
        return to_json
    if _is_enum(hint):
        return str
    if origin is tuple:
        return _tuple_writer(arguments)
    if origin in (dict, Mapping):
        return _mapping_writer(*arguments)
    return None


def _tuple_writer(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    writes = [_writer(kind) for kind in kinds if kind is not Ellipsis]
    if not any(writes):
        return list
    if kinds[-1] is Ellipsis:
        (write,) = writes
        assert write is not None
        return lambda values: [write(value) for value in values]
    return lambda values: [value if one is None else one(value) for one, value in zip(writes, values, strict=True)]


def _mapping_writer(key: Any, kind: Any) -> Callable[[Any], Any]:
    write = _writer(kind) or (lambda value: value)
    if get_origin(key) is tuple:
        return lambda values: [[*key, write(value)] for key, value in values.items()]
    return lambda values: {key: write(value) for key, value in values.items()}


# -- reading -----------------------------------------------------------------------------------------------------------

_Read = Callable[[Any], Any]
"""Reads a JSON value. Its error begins with the path below that value, and a blank."""


@cache
def _dataclass_reader(kind: Any, is_open: bool) -> _Read:
    readers = [(name, _reader(hint, (), is_open)) for name, hint in _hints(kind).items()]
    names, needed = _hints(kind).keys(), _needed(kind)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise WireError(" is not of type object")
        if not (needed <= value.keys() if is_open else names == value.keys()):
            raise WireError(_describe_fields(value, needed if is_open else names, names))
        found = {}
        for name, read_one in readers:
            if name in value:
                try:
                    found[name] = read_one(value[name])
                except WireError as error:
                    raise WireError(f".{name}{error}") from None
        try:
            return kind(**found)
        except UserError as error:
            raise WireError(f": {error}") from None

    return read


def _describe_fields(value: dict[str, Any], needed: Collection[str], names: Collection[str]) -> str:
    """What is wrong with the fields of an object; an unknown one is not shown, because the sender chose its name."""
    missing = [name for name in names if name in needed and name not in value]
    return f" lacks {missing[0]}" if missing else f" has a field that is none of {', '.join(names)}"


def _reader(hint: Any, bounds: tuple[Any, ...], is_open: bool) -> _Read:
    """The function that reads values of a type; without ``bounds``, within those of the type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _reader(arguments[0], tuple(one for one in arguments[1:] if one is not ranges.ADDED), is_open)
    if origin in (Union, types.UnionType):
        inner = _reader(_without_none(arguments), bounds, is_open)
        return lambda value: None if value is None else inner(value)
    if is_dataclass(hint):
        return _dataclass_reader(cast(Any, hint), is_open)
    if _is_enum(hint):
        members = {one.value: one for one in hint}
        text = _reader(str, (*bounds, ranges.OneOf(tuple(members))), is_open)
        return lambda value: members[text(value)]
    hint = hint.__supertype__ if isinstance(hint, NewType) else hint
    bounds = bounds or _BOUNDS.get(origin or hint, ())
    if origin is tuple:
        return _tuple_reader([_reader(kind, (), is_open) for kind in arguments if kind is not Ellipsis],
                             arguments[-1] is Ellipsis, bounds)  # fmt: skip
    if origin in (dict, Mapping):
        return _mapping_reader(arguments[0], arguments[1], bounds, is_open)
    kinds = (float, int) if hint is float else (hint,)
    return lambda value: _check(value, kinds, bounds)


def _tuple_reader(readers: list[_Read], has_any_length: bool, bounds: tuple[Any, ...]) -> _Read:
    def read(value: Any) -> tuple[Any, ...]:
        _check(value, (list,), bounds)
        if not has_any_length and len(value) != len(readers):
            raise WireError(f" has {len(value)} items, not {len(readers)}")
        found: list[Any] = []
        try:
            for read_one, item in zip(readers * len(value) if has_any_length else readers, value, strict=True):
                found.append(read_one(item))
        except WireError as error:
            raise WireError(f"[{len(found)}]{error}") from None
        return tuple(found)

    return read


def _mapping_reader(key: Any, kind: Any, bounds: tuple[Any, ...], is_open: bool) -> _Read:
    if get_origin(key) is tuple:
        rows = _reader(tuple[tuple[(*get_args(key), kind)], ...], bounds, is_open)  # type: ignore[misc]
        return lambda value: {row[:-1]: row[-1] for row in rows(value)}
    name, item = _reader(key, (), is_open), _reader(kind, (), is_open)
    return lambda value: {name(one): item(other) for one, other in _check(value, (dict,), bounds).items()}


@cache
def _needed(kind: Any) -> frozenset[str]:
    return frozenset(name for name, hint in _hints(kind).items() if ranges.ADDED not in get_args(hint)[1:])


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, StrEnum)


def _without_none(arguments: tuple[Any, ...]) -> Any:
    (inner,) = (one for one in arguments if one is not types.NoneType)
    return inner


def _check(value: Any, kinds: tuple[type, ...], bounds: tuple[Any, ...]) -> Any:
    if type(value) not in kinds:
        raise WireError(f" is not of type {_JSON_NAMES.get(kinds[0], kinds[0].__name__)}")
    for bound in bounds:
        problem = bound.problem(value)
        if problem is not None:
            raise WireError(f" is {problem}")
    return value
