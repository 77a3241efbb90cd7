"""Connects to SQLite or PostgreSQL, with settings that make commits durable."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from floodplain.core.errors import UserError

STATEMENT_TIMEOUT_S = 5
"""The longest wait for a lock, or for an answer."""
STOPPED_TIMEOUT_S = 2
"""After so long, a stopped leader on PostgreSQL loses its transaction and its locks."""


def open_database(url: str) -> sql.Engine:
    """Return an engine with one, still closed, connection for ``sqlite:///FILE`` or ``postgresql://…``.

    Raises:
        UserError: The address is of another kind, or what it needs does not exist.
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
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise UserError(f"--store: folder {folder} does not exist: create it")
    _make_private(Path(url.database))
    engine = sql.create_engine(url, pool_size=1, max_overflow=0, connect_args={"timeout": STATEMENT_TIMEOUT_S})

    @sql.event.listens_for(engine, "connect")
    def set_up(connection: Any, _: Any) -> None:
        # In WAL mode commits would not last through a power failure unless every one of them is synchronised
        # (https://www.sqlite.org/pragma.html#pragma_synchronous).
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL").close()

    return engine


def _make_private(path: Path) -> None:
    """Create the file, if it is new, for its owner alone: SQLite's other files get the same mode."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        os.close(fd)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--store: cannot open {str(path)!r} ({reason}): give another sqlite:///FILE") from error
    if not is_file:
        raise UserError(f"--store: {str(path)!r} is no regular file: give another sqlite:///FILE")


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
    except ImportError as error:
        raise UserError(f"a store in PostgreSQL needs psycopg ({error}): pip install 'floodplain[postgres]'") from None
