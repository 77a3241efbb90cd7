"""Reads YAML files that users name: their size and shape are bounded before any value is built."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing
from floodplain.files.reading import read_text


def read_yaml_mapping(path: Path, max_bytes: int, max_depth: int, kind: str = "") -> dict[Any, Any]:
    """The mapping in a YAML file; empty if the file is.

    Args:
        path: The file.
        max_bytes: More are refused.
        max_depth: Values that are nested deeper are refused.
        kind: What the file is to its owner, such as ``--config``: errors say it before the path.

    Raises:
        UserError: It cannot be read, is not a mapping, is nested deeply, or has aliases: a few lines of them can stand
            for billions of values.
    """
    import yaml

    source = f"{kind} {path}".strip()
    text = read_text(path, max_bytes, kind)
    with parsing(source):
        _check_shape(yaml.parse(text, yaml.SafeLoader), source, max_depth)
        content = yaml.safe_load(text)
    if not isinstance(content, dict | None):
        raise UserError(f"{path} must hold lines KEY: VALUE")
    return content or {}


def _check_shape(events: Iterable[Any], source: str, max_depth: int) -> None:
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{source}: aliases are not supported: write the value of *{event.anchor} out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > max_depth:
            raise UserError(f"{source}: values are nested deeper than {max_depth} levels")
