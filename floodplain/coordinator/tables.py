"""The tables of the store: members, leases that have not ended, and one row with the leader."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType, get_args, get_type_hints

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, MetaData, String, Table

from floodplain.leases.rows import Member
from floodplain.leases.states import Lease

SCHEMA = 4
"""Read by coordinators older than versions, which refuse a store of another schema."""

METADATA = MetaData()

BOOK = Table(
    "floodplain_book",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("leader", String, nullable=False),
    Column("leader_url", String, nullable=False),
    Column("ttl_s", Float, nullable=False),
    Column("floor", BigInteger, nullable=False),
)
"""One row. Every transaction of a leader begins by raising its beat, if its epoch is still the leader's own."""

_COLUMN_TYPES: Mapping[Any, Any] = {int: BigInteger, float: Float, bool: Boolean, str: String}


def _columns(kind: type[Member | Lease]) -> list[Column[Any]]:
    """A column for each field of a row; the first is the key. A new field takes a migration, too (``schema.py``)."""
    columns: list[Column[Any]] = []
    for name, hint in get_type_hints(kind).items():
        wanted, *others = get_args(hint) or (hint,)
        wanted = str if isinstance(wanted, NewType) or issubclass(wanted, StrEnum) else wanted
        columns.append(Column(name, _COLUMN_TYPES[wanted], primary_key=not columns, nullable=bool(others)))
    return columns


MEMBERS = Table("floodplain_members", METADATA, *_columns(Member))
LEASES = Table("floodplain_leases", METADATA, *_columns(Lease), Column("granted_unix_s", Float, nullable=False))

VERSION = Table("floodplain_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""One row: the version of the other tables, maintained by alembic (``schema.py`` and ``migrations``)."""
