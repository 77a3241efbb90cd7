"""Stores of older and newer coordinators: a leader upgrades the tables, a standby changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from floodplain.coordinator import schema
from floodplain.coordinator.schema import METADATA, VERSION
from floodplain.coordinator.service import LeaseService, Unavailable
from floodplain.coordinator.store import Leadership, Store, StoredRows, StoreError
from floodplain.core.errors import UserError
from floodplain.leases.rows import Member
from floodplain.leases.states import Lease, LeaseId, LeaseState
from floodplain.leases.table import Changes
from tests.support.coordinator_processes import run

FIRST_TABLES = """
CREATE TABLE floodplain_book (
    id INTEGER NOT NULL, schema INTEGER NOT NULL, epoch BIGINT NOT NULL, beat BIGINT NOT NULL,
    leader VARCHAR NOT NULL, leader_url VARCHAR NOT NULL, ttl_s FLOAT NOT NULL, floor BIGINT NOT NULL, PRIMARY KEY (id)
);
CREATE TABLE floodplain_members (
    name VARCHAR NOT NULL, instance VARCHAR NOT NULL, generation BIGINT NOT NULL, revision BIGINT NOT NULL,
    offered_bytes BIGINT NOT NULL, last_request BIGINT NOT NULL, is_gone BOOLEAN NOT NULL, is_lender BOOLEAN NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE floodplain_leases (
    lease_id VARCHAR NOT NULL, request BIGINT NOT NULL, producer VARCHAR NOT NULL, consumer VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL, generation BIGINT NOT NULL, state VARCHAR NOT NULL, revision BIGINT NOT NULL,
    held_bytes BIGINT NOT NULL, deadline_s FLOAT, reason VARCHAR NOT NULL, granted_unix_s FLOAT NOT NULL,
    PRIMARY KEY (lease_id)
);
INSERT INTO floodplain_book VALUES (1, 3, 7, 40, 'old', 'http://old', 10.0, 5);
INSERT INTO floodplain_members VALUES ('ann', 'i1', 2, 9, 20, 0, false, true);
INSERT INTO floodplain_members VALUES ('bob', 'i2', 1, 1, 0, 2, false, false);
INSERT INTO floodplain_leases VALUES ('bob.1.1.0', 1, 'ann', 'bob', 5, 1, 'held', 2, 5, NULL, '', 12.5);
INSERT INTO floodplain_leases VALUES ('bob.1.2.0', 2, 'ann', 'bob', 3, 1, 'recalled', 2, 0, 1.5, '', 13.5);
"""
"""Tables and rows of a coordinator from before ``floodplain_version``."""
ANN = Member("ann", "i1", 2, 9, 20, 0, is_lender=True, hidden_bytes=8)
BOB = Member("bob", "i2", 1, 1, 0, 2)
LEASES = [
    Lease(LeaseId("bob.1.1.0"), 1, "ann", "bob", 5, 1, LeaseState.HELD, 2, 5),
    Lease(LeaseId("bob.1.2.0"), 2, "ann", "bob", 3, 1, LeaseState.RECALLED, 2, 0, 1.5),
]
OLD = Leadership(epoch=7, beat=40, leader="old", leader_url="http://old", ttl_s=10.0)


def execute(url: str, statements: str) -> None:
    with transaction(url) as connection:
        for statement in filter(str.strip, statements.split(";\n")):
            connection.exec_driver_sql(statement)


@contextmanager
def transaction(url: str) -> Iterator[sql.Connection]:
    """A transaction without a store's time-outs, which are too short for slow tests."""
    engine = sql.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sql.pool.NullPool)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def tables(url: str) -> dict[str, list[Any]]:
    """The columns and rows of all tables in the database."""
    with transaction(url) as connection:
        found = sql.MetaData()
        found.reflect(connection)
        return {
            name: [table.columns.keys(), *sorted(map(tuple, connection.execute(sql.select(table))))]
            for name, table in found.tables.items()
        }


def drift(connection: sql.Connection, metadata: sql.MetaData = METADATA) -> Sequence[Any]:
    """Differences between a database's tables and ``metadata``."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION.name})
    found: Sequence[Any] = compare_metadata(context, metadata)
    return found


def lead(store: Store) -> StoredRows:
    rows = store.take_over(store.look(), "me", "http://me", 10.0)
    assert rows is not None
    return rows


# -- older stores ------------------------------------------------------------------------------------------------------


def test_leader_upgrades_a_store_of_the_first_version_with_its_leases(store_url: str) -> None:
    execute(store_url, FIRST_TABLES)
    with closing(Store.open(store_url)) as store:
        assert store.look() == OLD
        rows = lead(store)
        assert (sorted(rows.members, key=lambda row: row.name), rows.floor) == ([ANN, BOB], 5)
        assert sorted(rows.leases, key=lambda row: row.lease_id) == LEASES
        assert rows.granted_unix_s == {"bob.1.1.0": 12.5, "bob.1.2.0": 13.5}
        assert store.write(8, Changes((Member("eve", "i3"),), tuple(rows.leases), floor=5), 1.0, 10.0)
    with closing(Store.open(store_url)) as store:
        assert len(lead(store).members) == 3
    with transaction(store_url) as connection:
        assert drift(connection) == []
        assert connection.execute(sql.select(VERSION.c.version_num)).scalars().all() == [schema.NEWEST]


def test_coordinator_that_stands_by_changes_no_table(store_url: str) -> None:
    execute(store_url, FIRST_TABLES)
    before = tables(store_url)
    with closing(Store.open(store_url)) as store:
        assert store.look() == OLD
        late = Leadership(7, 39, "old", "http://old", 10.0)
        assert store.take_over(late, "me", "http://me", 10.0) is None
    assert tables(store_url) == before


def test_upgrade_that_fails_leaves_the_tables_to_the_old_leader(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(connection: sql.Connection, version: str) -> None:
        migrate(connection, version)
        raise StoreError("upgrade", None, ConnectionError("down"))

    migrate = schema.migrate
    monkeypatch.setattr(schema, "migrate", fail)
    execute(store_url, FIRST_TABLES)
    before = tables(store_url)
    with closing(Store.open(store_url)) as store:
        with pytest.raises(StoreError):
            lead(store)
        assert tables(store_url) == before
        monkeypatch.setattr(schema, "migrate", migrate)
        assert len(lead(store).leases) == 2


# -- newer stores ------------------------------------------------------------------------------------------------------


def make_newer(url: str) -> None:
    Store.open(url).close()
    execute(url, "UPDATE floodplain_version SET version_num = 'v99'")


def test_newer_store_is_refused_in_one_line(store_url: str) -> None:
    make_newer(store_url)
    before = tables(store_url)
    known = f"v99, and this coordinator knows {schema.FIRST} to {schema.NEWEST}: start a coordinator that knows them"
    with pytest.raises(UserError, match=known) as refused:
        Store.open(store_url)
    assert "\n" not in str(refused.value)
    assert tables(store_url) == before


def test_store_from_before_the_first_version_is_refused(store_url: str) -> None:
    execute(store_url, FIRST_TABLES + "UPDATE floodplain_book SET schema = 2")
    with pytest.raises(UserError, match=r"tables of version 0\.2"):
        Store.open(store_url)


@pytest.mark.slow
def test_coordinator_exits_with_2_where_the_store_is_newer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'leases.db'}"
    make_newer(url)
    done = run("coordinator", "--store", url, "--port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "tables of version v99" in done.stderr and done.stderr.count("\n") == 1


def test_coordinator_whose_store_a_newer_one_upgraded_leads_no_more(store_url: str) -> None:
    with closing(Store.open(store_url)) as store:
        service = LeaseService(store, "http://me", 10.0, lambda: 0.0)
        make_newer(store_url)
        before = tables(store_url)
        service.tick()
        (answer,) = service.serve([lambda book, now: None])
        assert isinstance(answer, Unavailable) and "tables of version v99" in answer.reason
        assert tables(store_url) == before


# -- scripts -----------------------------------------------------------------------------------------------------------


def test_migrations_make_the_tables_that_the_statements_are_for(store_url: str) -> None:
    with transaction(store_url) as connection:
        VERSION.create(connection)
        schema.migrate(connection, schema.NEWEST)
        assert drift(connection) == []
        wider = sql.MetaData()
        for table in METADATA.tables.values():
            table.to_metadata(wider)
        wider.tables["floodplain_members"].append_column(sql.Column("shoe_size", sql.Integer))
        assert len(drift(connection, wider)) == 1, "the control: a column that no script adds"


def test_new_store_is_of_the_newest_version(store_url: str) -> None:
    Store.open(store_url).close()
    with transaction(store_url) as connection:
        assert drift(connection) == []
        assert connection.execute(sql.select(VERSION.c.version_num)).scalars().all() == [schema.NEWEST]
    assert {schema.FIRST, schema.NEWEST} <= schema.known_versions()
