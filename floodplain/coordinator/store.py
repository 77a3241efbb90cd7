"""The store of a lease book: SQLite in a file, or PostgreSQL for several coordinators. One thread at a time.

Several coordinators may share a store; one of them leads. Its epoch is its fence: every transaction begins by raising
the ``beat`` of one row if the epoch is still its own, so a replaced leader can write nothing more.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from floodplain.coordinator import schema
from floodplain.coordinator.schema import BOOK, LEASES, MEMBERS
from floodplain.coordinator.soundness import DamagedStore, check_value, intact, sound, to_row
from floodplain.core.errors import UserError
from floodplain.files.extras import missing, require
from floodplain.leases.rows import Member
from floodplain.leases.states import Lease, LeaseId
from floodplain.leases.table import Changes

STATEMENT_TIMEOUT_S = 5
"""The longest wait for a lock, or for an answer."""
STOPPED_TIMEOUT_S = 2
"""After so long, a stopped leader on PostgreSQL loses its transaction and its locks."""


def open_database(url: str) -> sql.Engine:
    """Return an engine with one, still closed, connection for ``sqlite:///FILE`` or ``postgresql://…``.

    UserError if the address is of another kind, or what it needs does not exist.
    """
    parsed = _parse(url)
    if parsed.drivername == "sqlite":
        return _open_sqlite(parsed)
    if parsed.drivername == "postgresql":
        return _open_postgresql(parsed)
    shown = hide_password(url)
    raise UserError(f"--store {shown} is of no known kind: give sqlite:///FILE or postgresql://USER@HOST/NAME")


def hide_password(url: str | sql.URL) -> str:
    """Return a store's address without secrets, for logs and messages."""
    parsed = sql.make_url(url)
    secrets = {name: "hidden" for name in parsed.query if "password" in name}
    return parsed.update_query_dict(secrets).render_as_string(hide_password=True)


def _parse(url: str) -> sql.URL:
    try:
        parsed = sql.make_url(url)
        if "@" not in (parsed.host or ""):
            return parsed
    except (sql.exc.ArgumentError, ValueError):
        pass
    raise UserError(  # the text is not shown: there may be a password in it
        "--store is no address: give sqlite:///FILE or postgresql://USER@HOST/NAME (%40 is an @ in a password)"
    )


def _open_sqlite(url: sql.URL) -> sql.Engine:
    if not url.database or url.database == ":memory:":
        raise UserError("--store without a file would lose every lease with the process: give sqlite:///FILE")
    if url.query:
        raise UserError(f"--store {hide_password(url)} has options, and SQLite takes none: give sqlite:///FILE")
    path = Path(url.database)
    if not path.parent.is_dir():
        raise UserError(f"--store: folder {path.parent} does not exist: create it")
    opened = _make_private(path)
    engine = sql.create_engine(url, pool_size=1, max_overflow=0, connect_args={"timeout": STATEMENT_TIMEOUT_S})

    @sql.event.listens_for(engine, "connect")
    def set_up(connection: Any, _: Any) -> None:
        # In WAL mode commits would not last through a power failure unless every one of them is synchronised
        # (https://www.sqlite.org/pragma.html#pragma_synchronous).
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL").close()

    @sql.event.listens_for(engine, "begin")
    def expect_in_place(_: Any) -> None:
        """Rows in a file without a name are lost with this process, and another may lead in the file of that name."""
        if not (path.exists() and os.path.samestat(opened, path.stat())):
            shown = hide_password(url)
            raise DamagedStore(f"--store {shown} was removed or replaced while it was used: start again with one file")

    return engine


def _make_private(path: Path) -> os.stat_result:
    """Create the file, if it is new, for its owner alone: SQLite's other files get the same mode. Returns its status.

    UserError if it cannot be opened, or is no regular file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        status = os.fstat(fd)
        os.close(fd)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--store: cannot open {str(path)!r} ({reason}): give another sqlite:///FILE") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"--store: {str(path)!r} is no regular file: give another sqlite:///FILE")
    return status


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL, and retry for a time: of two processes that start with a new file, one fails without waiting."""
    deadline_s = time.monotonic() + STATEMENT_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline_s:
                raise
            time.sleep(0.01)


def _open_postgresql(url: sql.URL) -> sql.Engine:
    require("a store in PostgreSQL", "psycopg")
    timeouts_ms = {
        "statement_timeout": STATEMENT_TIMEOUT_S * 1000,
        "idle_in_transaction_session_timeout": STOPPED_TIMEOUT_S * 1000,
    }
    options = " ".join(f"-c {name}={value}" for name, value in timeouts_ms.items())
    try:
        return sql.create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_size=1,
            max_overflow=0,
            connect_args={
                "options": options,
                "connect_timeout": STATEMENT_TIMEOUT_S,
                "tcp_user_timeout": STATEMENT_TIMEOUT_S * 1000,
                "keepalives_idle": STATEMENT_TIMEOUT_S,  # for a host that vanished while it owes an answer
                "keepalives_interval": 1,
                "keepalives_count": 3,
            },
        )
    except ImportError as error:  # psycopg may lack the library libpq
        raise missing("a store in PostgreSQL", "psycopg", f"cannot be loaded ({error})") from None


Row = Mapping[str, Any]


class Statement:
    """A compiled statement for one dialect. Its columns hold only what drivers take unconverted: texts and numbers.

    SQLAlchemy would look it up, and all conversions, at every call: a third of the time of a transaction of few rows.
    """

    def __init__(self, statement: Any, dialect: sql.Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        self._text = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup

    def run(self, connection: sql.Connection, row: Row) -> int:
        """Execute it for one row; return the number of rows that changed."""
        return connection.exec_driver_sql(self._text, self._given(row)).rowcount

    def run_many(self, connection: sql.Connection, rows: Sequence[Row]) -> None:
        """Execute it once for each row."""
        if rows:
            connection.exec_driver_sql(self._text, [self._given(row) for row in rows])

    def _given(self, row: Row) -> Any:
        return dict(row) if self._order is None else tuple(row[name] for name in self._order)


StoreError = sql.exc.DBAPIError
"""The store is unreachable or does not answer: whether a write was done is unknown."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The leader and its epoch: how often the leader has changed, and (``beat``) how often one has written.

    ``leader`` is drawn at its start; empty if it resigned, or there never was one. Members may rely on answers of this
    leader, or of one before it, for ``ttl_s`` seconds from now.
    """

    epoch: int
    beat: int
    leader: str
    leader_url: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows from which a lease book is built; ``granted_unix_s`` is only to be shown."""

    members: Sequence[Member]
    leases: Sequence[Lease]
    granted_unix_s: Mapping[LeaseId, float]
    floor: int = 0


class Store:
    """Reads and writes the rows of a lease book, fenced by the leader's epoch; every method may raise ``StoreError``.

    The engine has one connection. ``shown_url`` is the store's address without a password.
    """

    def __init__(self, engine: sql.Engine) -> None:
        self._engine = engine
        self.shown_url = hide_password(engine.url)
        dialect = engine.dialect
        insert: Any = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[dialect.name]
        self._beat = Statement(_BEAT, dialect)
        self._put_member = Statement(_upsert(insert(MEMBERS), MEMBERS, "name"), dialect)
        self._put_lease = Statement(_upsert(insert(LEASES), LEASES, "lease_id", kept="granted_unix_s"), dialect)
        self._drop_member = Statement(MEMBERS.delete().where(MEMBERS.c.name == sql.bindparam("gone")), dialect)
        self._drop_lease = Statement(LEASES.delete().where(LEASES.c.lease_id == sql.bindparam("ended_id")), dialect)

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect to the store at ``url``, and create its tables if there are none.

        UserError if nothing answers there, or the tables are newer than this program's, or damaged.
        """
        store = cls(open_database(url))
        try:
            store._prepare()
        except (sql.exc.SQLAlchemyError, ValueError) as error:
            store.close()
            reason = str(getattr(error, "orig", error)).partition("\n")[0]
            raise UserError(f"--store {hide_password(url)} cannot be opened: {reason}") from error
        except UserError:
            store.close()
            raise
        return store

    def look(self) -> Leadership:
        """Return the present leadership; UserError if the store holds what no coordinator writes."""
        with sound(self.shown_url), self._engine.connect() as connection:
            return _read_leadership(connection)

    def take_over(self, seen: Leadership, leader: str, leader_url: str, ttl_s: float) -> StoredRows | None:
        """Lead with the next epoch, and return the stored rows; None if there was a write since ``seen``.

        Older tables are upgraded. UserError if they are newer than ours by now, or damaged; then nothing was done.
        """
        change = (
            BOOK.update()
            .where(BOOK.c.epoch == seen.epoch, BOOK.c.beat == seen.beat)
            .values(epoch=seen.epoch + 1, beat=seen.beat + 1, leader=leader, leader_url=leader_url, ttl_s=ttl_s)
        )
        with sound(self.shown_url), self._engine.begin() as connection:
            if self._engine.dialect.name == "postgresql":
                connection.execute(_END_STOPPED, {"timeout_s": STOPPED_TIMEOUT_S})
            if connection.execute(change).rowcount != 1:
                return None
            schema.upgrade(connection)
            return _read_rows(connection)

    def write(self, epoch: int, changes: Changes, unix_s: float, ttl_s: float) -> bool:
        """Write all changes and a beat in one transaction; True if the leader of ``epoch`` still leads.

        New leases are granted at ``unix_s``, which is now; ``ttl_s`` is the new ``Leadership.ttl_s``. UserError if a
        table is damaged, or missing.
        """
        ended = [{"ended_id": lease.lease_id} for lease in changes.leases if lease.has_ended]
        leases = [_lease_row(lease, unix_s) for lease in changes.leases if not lease.has_ended]
        members = [_member_row(member) for member in changes.members]
        with intact(self.shown_url), self._engine.begin() as connection:
            beat = {"own_epoch": epoch, "new_ttl_s": ttl_s, "new_floor": changes.floor}
            if self._beat.run(connection, beat) != 1:
                return False
            self._drop_member.run_many(connection, [{"gone": name} for name in changes.forgotten])
            self._put_member.run_many(connection, members)
            self._put_lease.run_many(connection, leases)
            self._drop_lease.run_many(connection, ended)
        return True

    def resign(self, epoch: int) -> None:
        """Remove the leader of ``epoch`` from the store, so that another coordinator may lead at once."""
        change = BOOK.update().where(BOOK.c.epoch == epoch).values(leader="", leader_url="")
        with self._engine.begin() as connection:
            connection.execute(change)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._engine.dispose()

    def _prepare(self) -> None:
        with self._engine.begin() as connection:
            if self._engine.dialect.name == "postgresql":  # coordinators that start together create them once
                connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_LOCK_ID)))
            else:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            with sound(self.shown_url):
                self._check(connection)

    def _check(self, connection: sql.Connection) -> None:
        if self._engine.dialect.name == "sqlite":
            said = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if said != "ok":
                raise ValueError(said)
        schema.make_tables(connection)
        is_newest = schema.check_version(connection)
        _read_leadership(connection)
        if is_newest:
            _read_rows(connection)


_BEAT = (
    BOOK.update()
    .where(BOOK.c.epoch == sql.bindparam("own_epoch"))
    .values(
        beat=BOOK.c.beat + sql.literal_column("1"), ttl_s=sql.bindparam("new_ttl_s"), floor=sql.bindparam("new_floor")
    )
)
_LOCK_ID = 0x666C6F6F64
_END_STOPPED = sql.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity JOIN pg_locks USING (pid) "
    "WHERE relation = 'floodplain_book'::regclass AND granted AND pid <> pg_backend_pid() AND usename = current_user "
    "AND wait_event = 'ClientRead' AND xact_start < clock_timestamp() - make_interval(secs => :timeout_s)"
)
"""Ends transactions on the book whose coordinators are stopped. The server's own timeout for those begins when it is
ready for the next query, so it misses a coordinator that stopped between the first and the last row of many, which are
sent as a pipeline.
"""
_LOOK = sql.select(BOOK.c.epoch, BOOK.c.beat, BOOK.c.leader, BOOK.c.leader_url, BOOK.c.ttl_s)
"""Columns that the tables have in every version."""
_MEMBER_FIELDS = [field.name for field in fields(Member)]
_LEASE_FIELDS = [field.name for field in fields(Lease)]


def _read_leadership(connection: sql.Connection) -> Leadership:
    return to_row(Leadership, connection.execute(_LOOK).mappings().one())


def _read_rows(connection: sql.Connection) -> StoredRows:
    members = [to_row(Member, row) for row in connection.execute(sql.select(MEMBERS)).mappings()]
    leases = [dict(row) for row in connection.execute(sql.select(LEASES)).mappings()]
    granted = {LeaseId(row["lease_id"]): row.pop("granted_unix_s") for row in leases}
    for granted_s in granted.values():
        check_value("granted_unix_s", granted_s, float)
    floor = connection.execute(sql.select(BOOK.c.floor)).scalar_one()
    check_value("floor", floor, int)
    return StoredRows(members, [to_row(Lease, row) for row in leases], granted, floor)


def _member_row(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in _MEMBER_FIELDS}


def _lease_row(lease: Lease, unix_s: float) -> dict[str, Any]:
    row = {name: getattr(lease, name) for name in _LEASE_FIELDS}
    return {**row, "state": lease.state.value, "granted_unix_s": unix_s}


def _upsert(insert: Any, table: sql.Table, key: str, kept: str | None = None) -> Any:
    names = [column.name for column in table.columns if column.name not in (key, kept)]
    return insert.on_conflict_do_update(index_elements=[key], set_={name: insert.excluded[name] for name in names})
