"""The tables of the store: members, leases that have not ended, and one row with the leader."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, MetaData, String, Table

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

MEMBERS = Table(
    "floodplain_members",
    METADATA,
    Column("name", String, primary_key=True),
    Column("instance", String, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("offered_bytes", BigInteger, nullable=False),
    Column("last_request", BigInteger, nullable=False),
    Column("is_gone", Boolean, nullable=False),
    Column("is_lender", Boolean, nullable=False),
    Column("hidden_bytes", BigInteger, nullable=False),
)

LEASES = Table(
    "floodplain_leases",
    METADATA,
    Column("lease_id", String, primary_key=True),
    Column("request", BigInteger, nullable=False),
    Column("producer", String, nullable=False),
    Column("consumer", String, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("held_bytes", BigInteger, nullable=False),
    Column("deadline_s", Float),
    Column("reason", String, nullable=False),
    Column("granted_unix_s", Float, nullable=False),
)

VERSION = Table("floodplain_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""One row: the version of the other tables, maintained by alembic (``schema.py`` and ``migrations``)."""
