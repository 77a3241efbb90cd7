"""Runs the ``migrations`` by alembic, which is imported only if tables are outdated."""

from __future__ import annotations

import logging

import sqlalchemy as sql
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory


def known_versions() -> set[str]:
    """Return the versions that have a script."""
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def migrate(connection: sql.Connection, version: str) -> None:
    """Upgrade tables that have a version to a later one, in the connection's transaction."""
    config = _config()
    config.attributes["connection"] = connection
    logging.getLogger("alembic").setLevel(logging.WARNING)
    command.upgrade(config, version)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "floodplain.coordinator:migrations")
    return config
