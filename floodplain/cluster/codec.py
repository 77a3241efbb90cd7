"""Frozen dataclasses as JSON values and back, by their annotations: each field has its type, or it is a ``WireError``.

Understood are int, float, str, bool, ``X | None``, ``tuple[X, ...]``, ``tuple[X, Y]``, dataclasses, and dicts by
strings or by tuples of strings; the latter become lists, since JSON's keys are strings.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from floodplain.core.errors import UserError
from floodplain.lending.fields import WireError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """What ``json.dumps`` takes, of a dataclass."""
    hints = _hints(value.__class__)
    return {item.name: _write(hints[item.name], getattr(value, item.name)) for item in fields(value)}


def from_json(kind: type[T], value: object) -> T:
    """The dataclass that was written.

    Raises:
        WireError: It is none of this kind.
    """
    result: T = _read(kind, value, kind.__name__)
    return result


def _write(hint: Any, value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, Mapping):
        if get_origin(get_args(hint)[0]) is tuple:
            return [[*key, item] for key, item in value.items()]
        return dict(value)
    if isinstance(value, tuple):
        return [_write(None, item) for item in value]
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(hint: Any, value: object, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (one for one in arguments if one is not types.NoneType)
        return None if value is None else _read(inner, value, where)
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if origin is dict:
        return _read_dict(arguments[0], arguments[1], value, where)
    if is_dataclass(hint):
        return _read_dataclass(hint, value, where)
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise WireError(f"{where} is not of type {hint.__name__}")
    return value


def _read_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise WireError(f"{where} is not a list")
    if kinds[-1] is Ellipsis:
        return tuple([_read(kinds[0], item, where) for item in value])
    if len(value) != len(kinds):
        raise WireError(f"{where} has {len(value)} items, not {len(kinds)}")
    return tuple([_read(kind, item, where) for kind, item in zip(kinds, value, strict=True)])


def _read_dict(key: Any, kind: Any, value: object, where: str) -> dict[Any, Any]:
    if get_origin(key) is tuple:
        kinds = (*get_args(key), kind)
        if not isinstance(value, list):
            raise WireError(f"{where} is not a list")
        rows = [_read_tuple(kinds, row, where) for row in value]
        return {row[:-1]: row[-1] for row in rows}
    if not isinstance(value, dict):
        raise WireError(f"{where} is not an object")
    return {name: _read(kind, item, where) for name, item in value.items()}


def _read_dataclass(kind: Any, value: object, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise WireError(f"{where} has not the fields of {kind.__name__}")
    try:
        return kind(**{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    except UserError as error:
        raise WireError(f"{where}: {error}") from None
