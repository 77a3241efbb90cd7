"""Adds ``hidden_bytes``: what ended leases may still hold of each device, by law 2 no more than is leased there.

Coordinators of the first version refuse the store from now on.
"""

from __future__ import annotations

import sqlalchemy as sql
from alembic import op

revision = "v2"
down_revision = "v1"


def upgrade() -> None:
    """Add the column with its upper bound as value."""
    op.add_column("floodplain_members", sql.Column("hidden_bytes", sql.BigInteger))
    op.execute(
        "UPDATE floodplain_members SET hidden_bytes = CAST(COALESCE((SELECT SUM(num_bytes) FROM floodplain_leases "
        "WHERE floodplain_leases.producer = floodplain_members.name), 0) AS BIGINT)"
    )
    with op.batch_alter_table("floodplain_members") as members:
        members.alter_column("hidden_bytes", existing_type=sql.BigInteger(), nullable=False)
    op.execute("UPDATE floodplain_book SET schema = 4")
