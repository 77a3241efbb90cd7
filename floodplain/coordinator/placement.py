"""Reads the pairs along which a coordinator grants from a placement file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

from floodplain.core.errors import UserError
from floodplain.files.parsing import read_json_object
from floodplain.leases.choice import AllowedPairs
from floodplain.leases.states import NAME

KIND, VERSION = "floodplain placement", 1
"""The file's ``kind`` and ``version``. The version is raised if ``pairs`` change their meaning."""


def read_pairs(path: Path) -> AllowedPairs:
    """Return the producers of each consumer, from a file of ``floodplain place --out``; UserError if it is none."""
    document = read_json_object(path)
    if document.get("kind") != KIND or document.get("version") != VERSION:
        raise UserError(f"{path} is no placement of version {VERSION}: write one with floodplain place --out")
    rows = document.get("pairs")
    if not isinstance(rows, list):
        raise UserError(f"{path}: pairs must be a list")
    producers: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        consumer, producer = (row.get("consumer"), row.get("producer")) if isinstance(row, dict) else (None, None)
        if not (_is_name(consumer) and _is_name(producer)):
            raise UserError(f"{path}, pairs[{place}] must have a producer and a consumer: names of members")
        producers.setdefault(consumer, []).append(producer)
    return producers


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and NAME.problem(value) is None
