"""The tables of coordinators from before versions were kept: such a store counts as this version."""

from __future__ import annotations

import sqlalchemy as sql
from alembic import op

revision = "v1"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "floodplain_book",
        sql.Column("id", sql.Integer, primary_key=True, autoincrement=False),
        sql.Column("schema", sql.Integer, nullable=False),
        sql.Column("epoch", sql.BigInteger, nullable=False),
        sql.Column("beat", sql.BigInteger, nullable=False),
        sql.Column("leader", sql.String, nullable=False),
        sql.Column("leader_url", sql.String, nullable=False),
        sql.Column("ttl_s", sql.Float, nullable=False),
        sql.Column("floor", sql.BigInteger, nullable=False),
    )
    op.create_table(
        "floodplain_members",
        sql.Column("name", sql.String, primary_key=True),
        sql.Column("instance", sql.String, nullable=False),
        sql.Column("generation", sql.BigInteger, nullable=False),
        sql.Column("revision", sql.BigInteger, nullable=False),
        sql.Column("offered_bytes", sql.BigInteger, nullable=False),
        sql.Column("last_request", sql.BigInteger, nullable=False),
        sql.Column("is_gone", sql.Boolean, nullable=False),
        sql.Column("is_lender", sql.Boolean, nullable=False),
    )
    op.create_table(
        "floodplain_leases",
        sql.Column("lease_id", sql.String, primary_key=True),
        sql.Column("request", sql.BigInteger, nullable=False),
        sql.Column("producer", sql.String, nullable=False),
        sql.Column("consumer", sql.String, nullable=False),
        sql.Column("num_bytes", sql.BigInteger, nullable=False),
        sql.Column("generation", sql.BigInteger, nullable=False),
        sql.Column("state", sql.String, nullable=False),
        sql.Column("revision", sql.BigInteger, nullable=False),
        sql.Column("held_bytes", sql.BigInteger, nullable=False),
        sql.Column("deadline_s", sql.Float),
        sql.Column("reason", sql.String, nullable=False),
        sql.Column("granted_unix_s", sql.Float, nullable=False),
    )
