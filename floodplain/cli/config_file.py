"""Reads ``--config FILE``: a flat YAML mapping, whose size and shape are bounded before it is built."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing
from floodplain.files.reading import read_text

MAX_CONFIG_BYTES = 2**16
MAX_DEPTH = 4
"""A mapping, a list in it, and room for a message about what is nested deeper."""


def read_config_file(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; empty if the file is.

    Raises:
        UserError: It cannot be read, is not a mapping, is nested deeply, or has aliases: a few lines of them can stand
            for billions of values.
    """
    import yaml

    source = f"--config {path}"
    text = read_text(path, MAX_CONFIG_BYTES, "--config")
    with parsing(source):
        _check_shape(yaml.parse(text, yaml.SafeLoader), source)
        content = yaml.safe_load(text)
    if not isinstance(content, dict | None):
        raise UserError(f"{path} must hold lines KEY: VALUE")
    return content or {}


def _check_shape(events: Iterable[Any], source: str) -> None:
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{source}: aliases are not supported: write the value of *{event.anchor} out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise UserError(f"{source}: values are nested deeper than {MAX_DEPTH} levels")
