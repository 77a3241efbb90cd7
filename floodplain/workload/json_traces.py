"""Traces of JSON rows in Mooncake's format, which aiperf and Dynamo also write.

Keys that a replay by arrival time cannot support are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import listed
from floodplain.workload.columns import parse_count, prefix_ids_of, read_json_rows
from floodplain.workload.times import TraceClock
from floodplain.workload.trace_row import MOONCAKE_BLOCK_TOKENS, TraceRow

NEEDED = ("timestamp", "input_length", "output_length")
TEXTS = ("conversations", "messages", "payload", "prompt", "text", "text_input")
REFUSED = {
    "branches": "a replay sends every row at its own time",
    "chat_id": "Qwen-Bailian traces count seconds, and blocks of 16 tokens: convert them to Mooncake's form",
    "delay": "a replay does not wait for the answer before: give the row a timestamp",
    "tool_events": "a replay sends every row at its own time",
    "tool_wait_ms": "a replay sends every row at its own time",
    "wait_for": "a replay sends every row at its own time",
}
"""Keys whose meaning a replay by arrival time does not support, with the reason."""


def json_rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a JSONL file or of a JSON list: ``timestamp`` (ms or a date), lengths and ``hash_ids``.

    A turn of a session with a ``timestamp`` arrives then; its ``delay`` is ignored.

    Raises:
        UserError: A row lacks a key, or has one that cannot be replayed.
    """
    clock = TraceClock(path, units_per_s=1000)
    for where, row in read_json_rows(path):
        _check_keys(where, row)
        yield TraceRow(
            clock.seconds(row["timestamp"]),
            parse_count(path, "input_length", row["input_length"]),
            parse_count(path, "output_length", row["output_length"]),
            prefix_ids_of(row, where),
        )


def _check_keys(where: str, row: Mapping[str, Any]) -> None:
    given = {key for key, value in row.items() if value is not None}
    for text in TEXTS:
        if text in given:
            raise UserError(f"{where} has texts under {text}: give the file as --prompts, with --request-rate")
    for key, reason in REFUSED.items():
        if row.get(key) and not (key == "delay" and "timestamp" in given):
            raise UserError(f"{where} has {key}, which cannot be replayed: {reason}")
    if row.get("block_size", MOONCAKE_BLOCK_TOKENS) != MOONCAKE_BLOCK_TOKENS:
        raise UserError(f"{where}: block_size must be {MOONCAKE_BLOCK_TOKENS}, the tokens that a hash id names")
    if not given.issuperset(NEEDED):
        raise UserError(f"{where} has keys {listed(row)}; it needs {', '.join(NEEDED)}")
