"""Reads ``--config FILE``: a flat YAML mapping of flags, with values as on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floodplain.files.yaml_file import read_yaml_mapping

MAX_CONFIG_BYTES = 2**16
MAX_DEPTH = 4
"""Levels that are parsed: a mapping, a list in it, and room for an error about deeper nesting."""


def read_config_file(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; empty if the file is.

    Numbers are returned as their text, so that a name such as ``1.10`` does not become ``1.1``.

    Raises:
        UserError: As ``read_yaml_mapping``.
    """
    return read_yaml_mapping(path, MAX_CONFIG_BYTES, MAX_DEPTH, "--config", same=dest_of, number=lambda text, _: text)


def dest_of(key: str) -> str:
    """The flag of a key, which may be written with ``-`` or with ``_``."""
    return key.replace("-", "_")
