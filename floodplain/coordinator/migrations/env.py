"""Alembic's environment: migrates the store on a given connection, in that connection's transaction."""

from __future__ import annotations

from alembic import context

from floodplain.coordinator.schema import METADATA, VERSION

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION.name
)
context.run_migrations()
