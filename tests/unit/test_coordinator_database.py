"""Addresses of stores: which are refused, and how they are shown."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from floodplain.coordinator.store import Store, hide_password
from floodplain.core.errors import UserError


@pytest.mark.parametrize(
    "address",
    [
        "",
        "leases.db",
        "postgresql:user:secret@host",
        "//user:secret@host/db",
        "postgresql://user:secret@host:port/db",
        "postgresql://user:secret@[::1/db",
        "postgresql://user:sec@secret@127.0.0.1:1/db",
        "postgresql://user:se/cret:secret@127.0.0.1:1/db",
        "postgres://user:secret@host/db",
        "mysql://user:secret@host/db?password=secret",
        "postgresql://user:secret@127.0.0.1:1/db",
        "postgresql://user:secret@127.0.0.1:-1/db",
        "postgresql://user:secret@127.0.0.1:1/db?nonsense=1",
        "postgresql://127.0.0.1:1/db?user=me&password=secret",
        "postgresql://127.0.0.1:1/db?sslpassword=secret",
        "postgresql://user:secret@a..b/db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?uri=true",
        "sqlite:///{folder}/new.db?timeout=soon",
        "sqlite:///{folder}",
        "sqlite:///{folder}/none/leases.db",
        "sqlite:///{folder}/text",
        "sqlite:///\0",
    ],
)
def test_a_bad_address_is_refused_in_one_line_that_shows_no_password(address: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but a text that is long enough to be looked at " * 20)
    with pytest.raises(UserError, match="--store") as caught:
        Store.open(address.replace("{folder}", str(tmp_path)))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_is_shown_without_its_password(tmp_path: Path) -> None:
    shown = hide_password("postgresql://user:secret@host/db?host=/run&password=secret")
    assert shown == "postgresql://user:***@host/db?host=%2Frun&password=hidden"
    with closing(Store.open(f"sqlite:///{tmp_path}/leases.db")) as store:
        assert store.shown_url == f"sqlite:///{tmp_path}/leases.db"


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_the_files_of_a_store_are_their_owners_alone(umask: int, tmp_path: Path) -> None:
    """At any umask: SQLite gives its other files the mode of the database file."""
    before = os.umask(umask)
    try:
        with closing(Store.open(f"sqlite:///{tmp_path}/leases.db")):
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("leases.db", "leases.db-shm", "leases.db-wal"), 0o600)
