"""Reads ``--config FILE``: a flat YAML mapping, whose size and shape are bounded before it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floodplain.files.yaml_file import read_yaml_mapping

MAX_CONFIG_BYTES = 2**16
MAX_DEPTH = 4
"""A mapping, a list in it, and room for a message about what is nested deeper."""


def read_config_file(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; empty if the file is.

    Raises:
        UserError: See ``read_yaml_mapping``.
    """
    return read_yaml_mapping(path, MAX_CONFIG_BYTES, MAX_DEPTH, "--config")
