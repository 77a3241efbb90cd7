"""Messages of a feed: the whole state once, then what changed. ``docs/api.md`` has their format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from floodplain.live.rows import Row


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A service at one moment: ``head`` has all but the rows of requests, as JSON values by name."""

    head: Mapping[str, Any]
    rows: Mapping[int, Row] = field(default_factory=dict)


def whole(now: Snapshot) -> dict[str, Any]:
    """The message with a whole snapshot."""
    return {"type": "whole", "columns": Row._fields, "head": now.head, "rows": list(now.rows.values())}


def change(before: Snapshot, now: Snapshot) -> dict[str, Any]:
    """The message that turns ``before`` into ``now``: values of the head and rows that changed.

    ``grown`` has (number, tokens, blocks) of rows in which nothing else changed, ``gone`` numbers of rows that ended.
    """
    rows: list[Row] = []
    grown: list[tuple[Any, ...]] = []
    for number, row in now.rows.items():
        old = before.rows.get(number)
        if old is row or old == row:
            continue
        if old is not None and old[_NUM_GROWING:] == row[_NUM_GROWING:]:
            grown.append(row[:_NUM_GROWING])
        else:
            rows.append(row)
    return {
        "type": "change",
        "head": {name: value for name, value in now.head.items() if before.head.get(name, _NONE) != value},
        "rows": rows,
        "grown": grown,
        "gone": [number for number in before.rows if number not in now.rows],
    }


_NONE = object()
_NUM_GROWING = 3
"""Number, tokens and blocks: the first values of a row."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as a server-sent event."""
    return b"data: " + json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode() + b"\n\n"


def apply(before: Snapshot, message: Mapping[str, Any]) -> Snapshot:
    """The snapshot after a decoded message: the inverse of ``whole`` and ``change``."""
    if message["type"] == "whole":
        return Snapshot(message["head"], {row[0]: _row(row) for row in message["rows"]})
    gone = set(message["gone"])
    rows = {number: row for number, row in before.rows.items() if number not in gone}
    rows |= {row[0]: _row(row) for row in message["rows"]}
    for number, tokens, blocks in message["grown"]:
        rows[number] = rows[number]._replace(tokens=tokens, blocks=blocks)
    return Snapshot({**before.head, **message["head"]}, rows)


def _row(values: list[Any]) -> Row:
    row = Row(*values)
    return row._replace(events=tuple((time_s, kind, blocks) for time_s, kind, blocks in row.events))
