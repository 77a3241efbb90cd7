"""The store of leases, on SQLite and a real PostgreSQL: rows persist, and only the leader writes."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sql
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from floodplain.coordinator.schema import BOOK, LEASES, MEMBERS
from floodplain.coordinator.soundness import DamagedStore
from floodplain.coordinator.store import Leadership, Store, StoredRows, StoreError, hide_password
from floodplain.core.errors import UserError
from floodplain.leases.rows import Member
from floodplain.leases.states import Lease, LeaseEvent, LeaseId
from floodplain.leases.table import Changes
from tests.support import lease_values
from tests.support.examples import examples
from tests.support.postgres import PostgresServer
from tests.support.waiting import HANG_S, wait_until

T = TypeVar("T")

TTL_S = 10.0
ANN = Member("ann", "i1", offered_bytes=9)
LEASE = Lease(LeaseId("l1"), 1, "ann", "bob", 5, 1)
SOME = Changes((ANN, Member("bob", "i2")), (LEASE,))


@pytest.fixture
def url(store_url: str) -> str:
    """The address of an empty store."""
    return store_url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(Store.open(url)) as opened:
        yield opened


def lead(store: Store, name: str = "me") -> tuple[int, StoredRows]:
    """Take over. Returns the new epoch and the stored rows."""
    seen = store.look()
    rows = store.take_over(seen, name, f"http://{name}", TTL_S)
    assert rows is not None
    return seen.epoch + 1, rows


def everything(store: Store) -> list[list[tuple[object, ...]]]:
    """All rows of all tables."""
    with store._engine.connect() as connection:
        return [sorted(map(tuple, connection.execute(sql.select(table)))) for table in (BOOK, MEMBERS, LEASES)]


def at_once(num_threads: int, do: Callable[[int], T]) -> list[T]:
    """The results of ``do(index)`` in threads that start together."""
    results: list[T | BaseException] = [AssertionError("it did not end")] * num_threads
    barrier = threading.Barrier(num_threads)

    def run(index: int) -> None:
        try:
            barrier.wait(HANG_S)
            results[index] = do(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    writes=st.lists(
        st.builds(
            Changes,
            st.lists(lease_values.MEMBERS, max_size=3, unique_by=lambda member: member.name),
            st.lists(lease_values.LEASES, max_size=3, unique_by=lambda lease: lease.lease_id),
        ),
        max_size=3,
    )
)
def test_the_next_leader_finds_the_last_rows_and_none_that_has_ended(store: Store, writes: list[Changes]) -> None:
    empty(store)
    epoch, _ = lead(store)
    members: dict[str, Member] = {}
    leases: dict[LeaseId, Lease] = {}
    granted: dict[LeaseId, float] = {}
    for number, changes in enumerate(writes):
        assert store.write(epoch, changes, 1e9 + number, TTL_S)
        members |= {member.name: member for member in changes.members}
        for lease in changes.leases:
            if lease.has_ended:
                leases.pop(lease.lease_id, None)
                granted.pop(lease.lease_id, None)
            else:
                leases[lease.lease_id] = lease
                granted.setdefault(lease.lease_id, 1e9 + number)
    _, rows = lead(store)
    assert {member.name: member for member in rows.members} == members
    assert {lease.lease_id: lease for lease in rows.leases} == leases
    assert rows.granted_unix_s == granted
    assert (len(rows.members), len(rows.leases)) == (len(members), len(leases))


def empty(store: Store) -> None:
    with store._engine.begin() as connection:
        connection.execute(MEMBERS.delete())
        connection.execute(LEASES.delete())


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("DELETE FROM floodplain_book", "No row was found"),
        ("DROP TABLE floodplain_book", "the table floodplain_book is missing"),
        ("DROP TABLE floodplain_leases", "floodplain_leases"),
        ("UPDATE floodplain_members SET offered_bytes = -1", "offered_bytes is -1"),
    ],
)
def test_a_store_that_no_coordinator_left_so_is_refused(url: str, statement: str, told: str) -> None:
    with closing(Store.open(url)) as store:
        epoch, _ = lead(store)
        assert store.write(epoch, SOME, 1.0, TTL_S)
        with store._engine.begin() as connection:
            connection.exec_driver_sql(statement)
    with pytest.raises(UserError, match=rf"^--store .* holds what no coordinator writes \(.*{told}.*\)[^\n]*$"):
        Store.open(url)


def test_a_forgotten_members_row_goes_and_the_floor_stays(url: str) -> None:
    with closing(Store.open(url)) as store:
        epoch, _ = lead(store)
        assert store.write(epoch, SOME, 1.0, TTL_S)
        assert store.write(epoch, Changes(forgotten=("ann", "never"), floor=7), 1.0, TTL_S)
        again = Member("ann", "i9", generation=8, revision=8)
        assert store.write(epoch, Changes((again,), floor=9), 1.0, TTL_S)
    with closing(Store.open(url)) as store:
        _, rows = lead(store)
    assert ({row.name: row.generation for row in rows.members}, rows.floor) == ({"bob": 1, "ann": 8}, 9)


def test_a_new_store_has_no_leader(store: Store) -> None:
    assert store.look() == Leadership(epoch=0, beat=0, leader="", leader_url="", ttl_s=0.0)
    assert lead(store) == (1, StoredRows([], [], {}))


# -- the fence ---------------------------------------------------------------------------------------------------------


def test_a_deposed_leader_writes_nothing_not_even_half(url: str, store: Store) -> None:
    old, _ = lead(store, "old")
    assert store.write(old, SOME, 1.0, TTL_S)
    with closing(Store.open(url)) as other:
        lead(other, "new")
        before = everything(other)
        ended = LEASE.after(LeaseEvent.RELEASE).after(LeaseEvent.SETTLE)
        assert not store.write(old, Changes((Member("eve", "i3"), Member("ann", "i4")), (ended,)), 2.0, TTL_S)
        assert not store.write(old, Changes(), 2.0, TTL_S)
        store.resign(old)
        assert everything(other) == before


def test_a_write_that_fails_in_its_middle_leaves_nothing(store: Store) -> None:
    epoch, _ = lead(store)
    assert store.write(epoch, SOME, 1.0, TTL_S)
    before = everything(store)
    too_large = Lease(LeaseId("l2"), 1, "ann", "bob", 2**70, 1)
    with pytest.raises((StoreError, OverflowError)):
        store.write(epoch, Changes((Member("eve", "i3"),), (too_large,)), 1.0, TTL_S)
    assert everything(store) == before
    assert store.write(epoch, Changes((Member("eve", "i3"),)), 1.0, TTL_S)


def test_a_takeover_fails_if_the_store_changed_since_the_look(store: Store) -> None:
    epoch, _ = lead(store)
    seen = store.look()
    assert store.write(epoch, Changes(), 1.0, TTL_S)
    assert store.take_over(seen, "late", "", 10.0) is None
    assert store.look().leader == "me"
    seen = store.look()
    lead(store, "quick")
    assert store.take_over(seen, "late", "", 10.0) is None
    assert store.look() == Leadership(2, 3, "quick", "http://quick", 10.0)


def test_of_those_that_take_over_at_once_one_leads(url: str) -> None:
    stores = [Store.open(url) for _ in range(4)]
    try:
        for epoch in range(1, 9):
            seen = [store.look() for store in stores]
            won = at_once(4, lambda i, seen=seen: stores[i].take_over(seen[i], str(i), "", 10.0))  # type: ignore[misc]
            assert [str(i) for i in range(4) if won[i] is not None] == [stores[0].look().leader]
            assert stores[0].look().epoch == epoch
    finally:
        for store in stores:
            store.close()


def test_those_that_open_a_new_store_at_once_all_find_it_made(url: str) -> None:
    for store in at_once(6, lambda _: Store.open(url)):
        with closing(store):
            assert store.look().epoch == 0


def test_resigning_keeps_the_rows_and_leaves_no_leader(store: Store) -> None:
    epoch, _ = lead(store)
    assert store.write(epoch, SOME, 1.0, TTL_S)
    store.resign(epoch)
    seen = store.look()
    assert (seen.epoch, seen.leader, seen.leader_url, seen.ttl_s) == (epoch, "", "", 10.0)
    _, rows = lead(store, "next")
    assert list(rows.leases) == [LEASE]


# -- stopped leaders and databases -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_leader_that_stops_in_a_transaction_loses_it_and_its_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodplain.coordinator.store.STOPPED_TIMEOUT_S", 0.3)
    with closing(Store.open(postgres_url)) as stopped, closing(Store.open(postgres_url)) as other:
        old, _ = lead(stopped, "stopped")
        with pytest.raises(StoreError), stopped._engine.begin() as connection:
            connection.execute(BOOK.update().where(BOOK.c.epoch == old).values(beat=99))
            lead(other, "other")  # waits for the stopped leader's lock
        assert other.look() == Leadership(2, 2, "other", "http://other", 10.0)
        assert not stopped.write(old, SOME, 1.0, TTL_S)
        assert everything(other)[1:] == [[], []]


@pytest.mark.slow
def test_a_leader_that_stops_between_rows_that_it_sends_loses_them_too(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodplain.coordinator.store.STOPPED_TIMEOUT_S", 0.3)
    monkeypatch.setattr("floodplain.coordinator.store.STATEMENT_TIMEOUT_S", 1)
    with closing(Store.open(postgres_url)) as stopped, closing(Store.open(postgres_url)) as other:
        psycopg = pytest.importorskip("psycopg")
        lead(stopped, "stopped")
        raw: Any = stopped._engine.raw_connection()
        with pytest.raises(psycopg.OperationalError), raw.dbapi_connection.pipeline():
            raw.dbapi_connection.execute("UPDATE floodplain_book SET beat = 99")
            raw.dbapi_connection.pgconn.send_flush_request()
            raw.dbapi_connection.pgconn.flush()
            wait_until(lambda: is_locked(postgres_url))  # it has run, and the server waits for more
            wait_until(lambda: takes_over(other))
        assert other.look() == Leadership(2, 2, "other", "", TTL_S)
        raw.invalidate()
        assert not stopped.write(1, SOME, 1.0, TTL_S)


def is_locked(url: str) -> bool:
    """Whether a transaction has locked the row of the book."""
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(url) as connection:
        try:
            connection.execute("SELECT 1 FROM floodplain_book FOR UPDATE NOWAIT")
        except psycopg.errors.LockNotAvailable:
            return True
        return False


def takes_over(store: Store) -> bool:
    try:
        return store.take_over(store.look(), "other", "", TTL_S) is not None
    except StoreError:
        return False


@pytest.mark.slow
def test_a_database_that_goes_away_is_an_error_until_it_is_back(postgres: PostgresServer, postgres_url: str) -> None:
    with closing(Store.open(postgres_url)) as store:
        epoch, _ = lead(store)
        assert store.write(epoch, SOME, 1.0, TTL_S)
        postgres.stop()
        try:
            for ask in (store.look, lambda: store.write(epoch, Changes(), 1.0, TTL_S), lambda: store.resign(epoch)):
                with pytest.raises(StoreError):
                    ask()
        finally:
            postgres.start()
        assert store.look().leader == "me"
        assert store.write(epoch, Changes((ANN,)), 1.0, TTL_S)
        assert set(lead(store)[1].members) == set(SOME.members)


@pytest.mark.slow
def test_a_database_restart_between_two_calls_is_an_error_once(postgres: PostgresServer, postgres_url: str) -> None:
    with closing(Store.open(postgres_url)) as store:
        epoch, _ = lead(store)
        postgres.stop()
        postgres.start()
        with pytest.raises(StoreError):
            store.write(epoch, SOME, 1.0, TTL_S)
        assert store.write(epoch, SOME, 1.0, TTL_S)


def test_a_locked_file_is_an_error_until_it_is_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodplain.coordinator.store.STATEMENT_TIMEOUT_S", 0.05)
    path = tmp_path / "leases.db"
    with closing(Store.open(f"sqlite:///{path}")) as store, closing(sqlite3.connect(path)) as other:
        epoch, _ = lead(store)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError):
            store.write(epoch, SOME, 1.0, TTL_S)
        assert store.look().leader == "me"
        other.rollback()
        assert store.write(epoch, SOME, 1.0, TTL_S)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_removed_or_replaced_is_written_no_more(is_replaced: bool, tmp_path: Path) -> None:
    """Its rows would be lost with the process, and another coordinator could grant the same memory."""
    path = tmp_path / "leases.db"
    with closing(Store.open(f"sqlite:///{path}")) as store:
        epoch, _ = lead(store)
        assert store.write(epoch, SOME, 0.0, TTL_S)
        path.unlink()
        if is_replaced:
            Store.open(f"sqlite:///{path}").close()
        for use in (lambda: store.write(epoch, Changes((), ()), 0.0, TTL_S), store.look, lambda: store.resign(epoch)):
            with pytest.raises(DamagedStore, match="was removed or replaced while it was used"):
                use()


def test_closing_twice_is_closing_once(store: Store) -> None:
    store.close()
    store.close()
    assert store._engine.pool.checkedin() == 0  # type: ignore[attr-defined]


# -- addresses of stores -----------------------------------------------------------------------------------------------


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
