"""A damaged store is either led, with consistent rows, or refused in one line."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import NoResultFound

from floodplain.coordinator import store as store_module
from floodplain.coordinator.run import coordinate
from floodplain.coordinator.schema import BOOK, LEASES, MEMBERS, VERSION
from floodplain.coordinator.service import LeaseService
from floodplain.coordinator.settings import CoordinatorConfig
from floodplain.coordinator.soundness import DamagedStore
from floodplain.coordinator.store import Store
from floodplain.coordinator.worker import LeaseWorker
from floodplain.core.errors import UserError
from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Join, Message, Offer, Recall, Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseEvent, LeaseId, Stamp
from tests.support.examples import examples

TABLES = {table.name: list(table.columns.keys()) for table in (BOOK, MEMBERS, LEASES, VERSION)}
COLUMNS = [(table, column) for table, columns in TABLES.items() for column in columns]
VALUES = ["'x'", "''", "-1", "1.5", "9e999", "x'ff00'", "NULL", "3", "9223372036854775807", "'9223372036854775808'"]
SQL = st.one_of(
    st.tuples(st.sampled_from(COLUMNS), st.sampled_from(VALUES)).map(
        lambda drawn: f"UPDATE OR REPLACE {drawn[0][0]} SET {drawn[0][1]} = {drawn[1]}"
    ),
    st.sampled_from(list(TABLES)).map("DELETE FROM {}".format),
    st.sampled_from(list(TABLES)).map("DROP TABLE {}".format),
    st.sampled_from(COLUMNS).map(lambda drawn: f"ALTER TABLE {drawn[0]} RENAME COLUMN {drawn[1]} TO other"),
    st.just(
        f"INSERT INTO {BOOK.name} SELECT id + 1, schema, epoch, beat, leader, leader_url, ttl_s, floor FROM {BOOK.name}"
    ),
)
BYTES = st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 16, 4096, 2**20]), st.binary(max_size=16))


def say(service: LeaseService, *messages: Message) -> None:
    service.serve([service.handle(messages)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A store with leases in several states, written by a coordinator that resigned."""
    path = tmp_path_factory.mktemp("whole") / "leases.db"
    with closing(Store.open(f"sqlite:///{path}")) as store:
        service = LeaseService(store, "http://me", 10.0, lambda: 100.0)
        service.tick()
        say(service, Join("p", "p-1"), Join("c", "c-1"), Offer("p", Stamp(1, 1), 30))
        say(service, *(Request("c", 1, number, (Shard(10),)) for number in (1, 2, 3)))
        say(service, Report("c", LeaseId("c.1.1.0"), Stamp(1, 1), LeaseEvent.HOLD))
        say(service, Recall("p", Stamp(1, 2), 10, deadline_s=5.0))
        service.resign()
    return path.read_bytes()


@contextmanager
def stored(folder: Path, content: bytes) -> Iterator[str]:
    path = folder / "leases.db"
    for old in folder.glob("leases.db*"):
        old.unlink()
    path.write_bytes(content)
    yield f"sqlite:///{path}"


def execute(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "leases.db")) as connection, connection:
        connection.execute(statement)


def lead(url: str) -> int:
    """Return how many leases a coordinator takes over; its errors propagate."""
    with closing(Store.open(url)) as store:
        service = LeaseService(store, "http://me", 10.0, lambda: 100.0)
        service.tick()
        assert service.is_leading, "a sound store that has no leader is led at once"

        def job(book: LeaseBook, _: float) -> int:
            book.rows.check_integrity()
            return len(book.rows.leases)

        (num_leases,) = service.serve([job])
        assert isinstance(num_leases, int)
        return num_leases


def is_led_or_refused(url: str) -> bool:
    try:
        lead(url)
    except UserError as error:
        return "\n" not in str(error) and len(str(error)) < 1000
    except AssertionError:
        return False
    return True


def test_a_whole_store_is_led(whole: bytes, tmp_path: Path) -> None:
    with stored(tmp_path, whole) as url:
        assert lead(url) == 3


@given(statement=SQL)
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_rows_that_no_coordinator_writes_are_one_line(statement: str, whole: bytes, tmp_path: Path) -> None:
    with stored(tmp_path, whole) as url:
        try:
            execute(tmp_path, statement)
        except sqlite3.IntegrityError:  # the table's own constraints
            return
        assert is_led_or_refused(url), statement


@given(place=BYTES)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_file_that_was_cut_or_overwritten_is_one_line(
    place: tuple[float, int, bytes], whole: bytes, tmp_path: Path
) -> None:
    begin = int(place[0] * len(whole))
    with stored(tmp_path, whole[:begin] + place[2] + whole[begin + place[1] :]) as url:
        assert is_led_or_refused(url)


def test_without_the_checks_the_law_is_broken(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without ``sound``, a damaged store raises an unhandled database error."""
    with stored(tmp_path, whole) as url, closing(Store.open(url)) as store:
        execute(tmp_path, f"DELETE FROM {BOOK.name}")
        with pytest.raises(DamagedStore):
            store.look()
        monkeypatch.setattr(store_module, "sound", lambda _: nullcontext())
        with pytest.raises(NoResultFound):
            store.look()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (f"DELETE FROM {BOOK.name}", "No row was found"),
        (f"DROP TABLE {BOOK.name}", "the table floodplain_book is missing"),
        (f"DROP TABLE {MEMBERS.name}", "no such table: floodplain_members"),
        (f"DELETE FROM {VERSION.name}", "No row was found"),
        (f"UPDATE {LEASES.name} SET num_bytes = 'ten'", "num_bytes is 'ten'"),
        (f"UPDATE {MEMBERS.name} SET offered_bytes = -1", "offered_bytes is -1"),
        (f"UPDATE {BOOK.name} SET ttl_s = 9e999", "ttl_s is inf"),
    ],
)
def test_a_coordinator_with_a_damaged_store_does_not_start(
    statement: str, told: str, whole: bytes, tmp_path: Path
) -> None:
    with stored(tmp_path, whole) as url:
        execute(tmp_path, statement)
        with pytest.raises(UserError) as caught:
            coordinate(CoordinatorConfig(store=url, port=0), lambda *_: pytest.fail("it is not ready"))
    assert str(caught.value).startswith(f"--store {url} holds what no coordinator writes (")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (f"UPDATE {MEMBERS.name} SET offered_bytes = 29", "30 bytes of 'p' are leased, and 29 were put up"),
        (f"DELETE FROM {MEMBERS.name} WHERE name = 'c'", "a member of lease 'c.1.1.0' is missing"),
        (f"UPDATE {LEASES.name} SET state = 'settled'", "is settled"),
        (f"UPDATE {LEASES.name} SET state = 'recalled', deadline_s = NULL", "is recalled"),
        (f"UPDATE {LEASES.name} SET state = 'lent'", "'lent' is not a valid LeaseState"),
    ],
)
def test_rows_that_contradict_each_other_end_the_worker_with_one_line(
    statement: str, told: str, whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stored(tmp_path, whole) as url, closing(Store.open(url)) as store:
        execute(tmp_path, statement)
        worker = LeaseWorker(LeaseService(store, "http://me", 10.0, lambda: 100.0))
        worker._run()
    assert isinstance(worker.failure, DamagedStore) and told in str(worker.failure)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_table_that_goes_while_a_coordinator_leads_ends_it(whole: bytes, tmp_path: Path) -> None:
    with stored(tmp_path, whole) as url, closing(Store.open(url)) as store:
        service = LeaseService(store, "http://me", 10.0, lambda: 100.0)
        service.tick()
        execute(tmp_path, f"DROP TABLE {MEMBERS.name}")
        with pytest.raises(DamagedStore, match="no such table: floodplain_members"):
            say(service, Join("q", "q-1"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "text", "device"])
def test_what_is_no_database_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("leases\n" * 1000)
    else:
        path = Path("/dev/null")
    with pytest.raises(UserError, match=r"^--store[^\n]*(/dev/null|leases\.db)[^\n]*$"):
        Store.open(f"sqlite:///{path}")
