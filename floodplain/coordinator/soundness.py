"""Whether a store holds what a coordinator writes: on anything else memory could be granted twice, so it is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

import sqlalchemy as sql

from floodplain.core.errors import UserError
from floodplain.files.parsing import reason_of
from floodplain.leases.rows import Member
from floodplain.leases.states import ENDED, Lease, LeaseState

R = TypeVar("R", Member, Lease)

_TYPES = {row: get_type_hints(row) for row in (Member, Lease)}
_MOST = 2**63 - 1
_SQLITE_DAMAGE = frozenset({1, 11, 26})
"""SQLITE_ERROR (no such table or column), SQLITE_CORRUPT, SQLITE_NOTADB."""


class DamagedStore(UserError):
    """The store holds what no coordinator writes, or lacks what one made."""


@contextmanager
def sound(shown_url: str) -> Iterator[None]:
    """While the context is open, what the store at ``shown_url`` says must be what a coordinator wrote.

    Raises:
        DamagedStore: It is not.
        DBAPIError: The store cannot be reached, or does not answer.
        UserError: As raised inside.
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
    """While the context is open, tables that are damaged or gone end it.

    Raises:
        DamagedStore: They are.
    """
    try:
        yield
    except sql.exc.DBAPIError as error:
        if not _is_damage(error):
            raise
        raise _damaged(shown_url, error.orig or error) from error


def to_row(kind: type[R], values: Mapping[str, Any]) -> R:
    """A row of the store as a value.

    Raises:
        ValueError: A column holds what no coordinator writes there.
    """
    found = dict(values)
    if kind is Lease:
        found["state"] = LeaseState(found["state"])
    for name, wanted in _TYPES[kind].items():
        check_value(name, found[name], wanted)
    return kind(**found)


def check_value(name: str, value: object, wanted: Any) -> None:
    """See that a column's value is of a type; numbers are not negative, finite, and of 64 bits.

    Raises:
        ValueError: It is not.
    """
    wanted = getattr(wanted, "__supertype__", wanted)  # of a NewType
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_odd = isinstance(value, int | float) and not (math.isfinite(value) and 0 <= value <= _MOST)
    if is_odd or not isinstance(value, wanted) or (wanted is int and not is_number):
        raise ValueError(f"{name} is {value!r:.60}")


def check_rows(members: Sequence[Member], leases: Sequence[Lease]) -> None:
    """See that leases lie within what their producers have put up, and are in states that a store keeps.

    Raises:
        ValueError: They are not.
    """
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
