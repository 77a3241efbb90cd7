"""Checks that a store holds only what a coordinator writes: with anything else memory could be granted twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, get_type_hints

import sqlalchemy as sql

from floodplain.core.errors import UserError
from floodplain.files.parsing import reason_of
from floodplain.leases.rows import Member
from floodplain.leases.states import ENDED, Lease, LeaseState

R = TypeVar("R")

_types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
_MOST = 2**63 - 1
_SQLITE_DAMAGE = frozenset({1, 11, 26})
"""SQLITE_ERROR (no such table or column), SQLITE_CORRUPT, SQLITE_NOTADB."""


class DamagedStore(UserError):
    """The store holds what no coordinator writes, lacks tables or columns, or is gone."""


@contextmanager
def sound(shown_url: str) -> Iterator[None]:
    """Turn errors from unexpected content of the store at ``shown_url`` into ``DamagedStore``.

    Other UserErrors pass, and the DBAPIErrors of a store that does not answer.
    """
    with intact(shown_url):
        try:
            yield
        except (UserError, sql.exc.DBAPIError):
            raise
        except Exception as error:
            raise _damaged(shown_url, error) from error


@contextmanager
def intact(shown_url: str) -> Iterator[None]:
    """Turn errors from damaged or missing tables into ``DamagedStore``."""
    try:
        yield
    except sql.exc.DBAPIError as error:
        if not _is_damage(error):
            raise
        raise _damaged(shown_url, error.orig or error) from error


def to_row(kind: type[R], values: Mapping[Any, Any]) -> R:
    """Return a row of the store as a value; ValueError if a column holds what no coordinator writes there."""
    found = dict(values)
    for name, wanted in _types_of(kind).items():
        found[name] = LeaseState(found[name]) if wanted is LeaseState else found[name]
        check_value(name, found[name], wanted)
    return kind(**found)


def check_value(name: str, value: object, wanted: Any) -> None:
    """Raise ValueError if a column's value is not of a type; numbers must be finite, not negative, and of 64 bits."""
    wanted = getattr(wanted, "__supertype__", wanted)  # of a NewType
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_odd = isinstance(value, int | float) and not (math.isfinite(value) and 0 <= value <= _MOST)
    if is_odd or not isinstance(value, wanted) or (wanted is int and not is_number):
        raise ValueError(f"{name} is {value!r:.60}")


def check_rows(members: Sequence[Member], leases: Sequence[Lease]) -> None:
    """Raise ValueError if leases exceed what their producers offer, or are in states that no store keeps."""
    offered = {member.name: member.offered_bytes for member in members}
    leased: Counter[str] = Counter()
    for lease in leases:
        leased[lease.producer] += lease.num_bytes
        if lease.producer not in offered or lease.consumer not in offered:
            raise ValueError(f"a member of lease {lease.lease_id!r:.60} is missing")
        if lease.state in ENDED or (lease.state is LeaseState.RECALLED and lease.deadline_s is None):
            raise ValueError(f"lease {lease.lease_id!r:.60} is {lease.state.value}")
    for name, num_bytes in leased.items():
        if num_bytes > offered[name]:
            raise ValueError(f"{num_bytes} bytes of {name!r:.60} are leased, and {offered[name]} were put up")


def _damaged(shown_url: str, error: BaseException) -> DamagedStore:
    problem = f"holds what no coordinator writes ({reason_of(error)})"
    return DamagedStore(f"--store {shown_url} {problem}: give another one, or a copy from before")


def _is_damage(error: sql.exc.DBAPIError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code & 0xFF in _SQLITE_DAMAGE if code is not None else isinstance(error, sql.exc.ProgrammingError)
