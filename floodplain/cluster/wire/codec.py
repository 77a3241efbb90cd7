"""Frozen dataclasses as JSON values and back. A value that does not fit its field's annotation is a ``WireError``.

Supported are int, float, str, bool, string enums, ``X | None``, ``tuple[X, ...]``, ``tuple[X, Y]``,
dataclasses, and dicts by strings or by tuples of strings; the latter become lists, since JSON's keys are strings. All
are bounded: by ``Annotated`` (``core.ranges``), else by the default bounds of the type (``_BOUNDS``).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from floodplain.core import ranges
from floodplain.core.errors import UserError
from floodplain.lending.fields import WireError

T = TypeVar("T")

_BOUNDS: Mapping[Any, Any] = {
    int: ranges.COUNT,
    float: ranges.SECONDS,
    str: ranges.NAME,
    tuple: ranges.ITEMS,
    dict: ranges.ENTRIES,
}


def to_json(value: Any) -> Any:
    """The JSON object of a dataclass, as ``json.dumps`` takes it."""
    hints = _hints(value.__class__)
    return {item.name: _write(hints[item.name], getattr(value, item.name)) for item in fields(value)}


def from_json(kind: type[T], value: object) -> T:
    """The dataclass of type ``kind`` in a JSON value.

    Raises:
        WireError: It is not a valid one.
    """
    result: T = _read(kind, value, kind.__name__)
    return result


def _write(hint: Any, value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, Mapping):
        hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if get_origin(get_args(hint)[0]) is tuple:
            return [[*key, item] for key, item in value.items()]
        return dict(value)
    if isinstance(value, tuple):
        return [_write(None, item) for item in value]
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read(hint: Any, value: object, where: str, bound: Any = None) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _read(arguments[0], value, where, arguments[1])
    if origin in (Union, types.UnionType):
        (inner,) = (one for one in arguments if one is not types.NoneType)
        return None if value is None else _read(inner, value, where, bound)
    if is_dataclass(hint):
        return _read_dataclass(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(_read(str, value, where, ranges.OneOf(tuple(one.value for one in hint))))
    bound = bound or _BOUNDS.get(origin or hint)
    if origin is tuple:
        return _read_tuple(arguments, value, where, bound)
    if origin is dict:
        return _read_dict(arguments[0], arguments[1], value, where, bound)
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise WireError(f"{where} is not of type {hint.__name__}")
    return _check(bound, value, where)


def _check(bound: Any, value: Any, where: str) -> Any:
    problem = None if bound is None else bound.problem(value)
    if problem is not None:
        raise WireError(f"{where} is {problem}")
    return value


def _read_tuple(kinds: tuple[Any, ...], value: object, where: str, bound: Any = None) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise WireError(f"{where} is not a list")
    _check(bound, value, where)
    if kinds[-1] is Ellipsis:
        return tuple([_read(kinds[0], item, where) for item in value])
    if len(value) != len(kinds):
        raise WireError(f"{where} has {len(value)} items, not {len(kinds)}")
    return tuple([_read(kind, item, where) for kind, item in zip(kinds, value, strict=True)])


def _read_dict(key: Any, kind: Any, value: object, where: str, bound: Any) -> dict[Any, Any]:
    if get_origin(key) is tuple:
        kinds = (*get_args(key), kind)
        if not isinstance(value, list):
            raise WireError(f"{where} is not a list")
        rows = [_read_tuple(kinds, row, where) for row in _check(bound, value, where)]
        return {row[:-1]: row[-1] for row in rows}
    if not isinstance(value, dict):
        raise WireError(f"{where} is not an object")
    return {_read(key, name, where): _read(kind, item, where) for name, item in _check(bound, value, where).items()}


def _read_dataclass(kind: Any, value: object, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise WireError(f"{where} has not the fields of {kind.__name__}")
    try:
        return kind(**{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    except UserError as error:
        raise WireError(f"{where}: {error}") from None
