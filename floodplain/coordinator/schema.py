"""The tables of a store, their version, and their upgrade by a leader.

A coordinator that opens a store creates the tables if there are none, and changes no others. The next leader upgrades
them in the transaction that raises the epoch. No migration changes the columns that are read to take over: ``epoch``,
``beat``, ``leader``, ``leader_url`` and ``ttl_s`` of the book.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NewType, get_args, get_type_hints

import sqlalchemy as sql
from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, MetaData, String, Table

from floodplain.core.errors import UserError
from floodplain.leases.rows import Member
from floodplain.leases.states import Lease

if TYPE_CHECKING:
    from alembic.config import Config

logger = logging.getLogger(__name__)

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
    """A column for each field of a row; the first is the key. A new field takes a migration, too."""
    columns: list[Column[Any]] = []
    for name, hint in get_type_hints(kind).items():
        wanted, *others = get_args(hint) or (hint,)
        wanted = str if isinstance(wanted, NewType) or issubclass(wanted, StrEnum) else wanted
        columns.append(Column(name, _COLUMN_TYPES[wanted], primary_key=not columns, nullable=bool(others)))
    return columns


MEMBERS = Table("floodplain_members", METADATA, *_columns(Member))
LEASES = Table("floodplain_leases", METADATA, *_columns(Lease), Column("granted_unix_s", Float, nullable=False))

VERSION = Table("floodplain_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""One row: the version of the other tables, maintained by alembic (``migrations``)."""


FIRST, NEWEST = "v1", "v2"
_OURS = {*METADATA.tables, VERSION.name}
UPGRADE_IDLE_S = 60
"""How long PostgreSQL waits between two statements of an upgrade: alembic loads its scripts between them."""
UNVERSIONED_SCHEMA = 3
"""``schema`` of a store older than versions; its tables are those of ``FIRST``."""


def make_tables(connection: sql.Connection) -> None:
    """Create the tables of the newest version, if the store has none; ValueError if it has some, but not the book."""
    there = {table for table in sql.inspect(connection).get_table_names() if table in _OURS}
    if there and BOOK.name not in there:
        raise ValueError(f"the table {BOOK.name} is missing")
    if not there:
        METADATA.create_all(connection)
        no_leader = {"leader": "", "leader_url": "", "ttl_s": 0.0}
        connection.execute(BOOK.insert().values(id=1, schema=SCHEMA, epoch=0, beat=0, floor=0, **no_leader))
        _stamp(connection, NEWEST)


def check_version(connection: sql.Connection) -> bool:
    """Whether the tables are of the newest version. Raises UserError if they cannot be upgraded to it either."""
    return _read_version(connection) == NEWEST


def upgrade(connection: sql.Connection) -> None:
    """Upgrade the tables to the newest version, in a leader's transaction after its fence. UserError if it cannot."""
    version = _read_version(connection)
    if not _is_versioned(connection):
        _stamp(connection, version)
    if version != NEWEST:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{UPGRADE_IDLE_S}s'")
        migrate(connection, NEWEST)
        logger.info("the tables of the store were upgraded from version %s to %s", version, NEWEST)


def _is_versioned(connection: sql.Connection) -> bool:
    return sql.inspect(connection).has_table(VERSION.name)


def _read_version(connection: sql.Connection) -> str:
    """The version of the tables. Raises UserError if it is neither the newest nor can be upgraded to it."""
    if _is_versioned(connection):
        version = str(connection.execute(sql.select(VERSION.c.version_num)).scalar_one())
    else:
        schema = connection.execute(sql.select(BOOK.c.schema)).scalar_one()
        version = FIRST if schema == UNVERSIONED_SCHEMA else f"0.{schema}"
    if version != NEWEST and version not in known_versions():
        raise UserError(
            f"the store has tables of version {version}, and this coordinator knows {FIRST} to {NEWEST}: "
            "start a coordinator that knows them, or give another --store"
        )
    return version


def _stamp(connection: sql.Connection, version: str) -> None:
    VERSION.create(connection)
    connection.execute(VERSION.insert().values(version_num=version))


# -- alembic, which is imported only if tables are outdated ------------------------------------------------------------


def known_versions() -> set[str]:
    """Return the versions that have a script."""
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(_alembic_config()).walk_revisions()}


def migrate(connection: sql.Connection, version: str) -> None:
    """Upgrade tables that have a version to a later one, in the connection's transaction."""
    from alembic import command

    config = _alembic_config()
    config.attributes["connection"] = connection
    logging.getLogger("alembic").setLevel(logging.WARNING)
    command.upgrade(config, version)


def _alembic_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "floodplain.coordinator:migrations")
    return config
