"""Runs the scripts of ``migrations`` by alembic, which is imported only where tables are not of the newest version."""

from __future__ import annotations

import logging

import sqlalchemy as sql
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory


def known_versions() -> set[str]:
    """Versions that there is a script for."""
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def migrate(connection: sql.Connection, version: str) -> None:
    """Bring tables that have a version to a later one, in the connection's transaction."""
    config = _config()
    config.attributes["connection"] = connection
    logging.getLogger("alembic").setLevel(logging.WARNING)
    command.upgrade(config, version)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "floodplain.coordinator:migrations")
    return config
