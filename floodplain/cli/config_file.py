"""Reads ``--config FILE``: a flat YAML mapping of flags, whose values are read as those of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floodplain.files.yaml_file import read_yaml_mapping

MAX_CONFIG_BYTES = 2**16
MAX_DEPTH = 4
"""A mapping, a list in it, and room for a message about what is nested deeper."""


def read_config_file(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; empty if the file is.

    A number is the text that stands there: a name such as ``1.10`` is no ``1.1``.

    Raises:
        UserError: See ``read_yaml_mapping``.
    """
    return read_yaml_mapping(path, MAX_CONFIG_BYTES, MAX_DEPTH, "--config", same=dest_of, number=lambda text, _: text)


def dest_of(key: str) -> str:
    """The flag that a key is about, whether it is written with ``-`` or with ``_``."""
    return key.replace("-", "_")
