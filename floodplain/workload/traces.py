"""Reads recorded arrivals: Azure, BurstGPT and Mooncake traces, distinguished by their columns.

Azure: https://github.com/Azure/AzurePublicDataset · BurstGPT: https://github.com/HPMLL/BurstGPT ·
Mooncake: https://github.com/kvcache-ai/Mooncake (FAST25-release/traces); aiperf and Dynamo also write its format.
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import listed
from floodplain.workload.columns import (
    OUTPUT_COLUMNS,
    PROMPT_COLUMNS,
    find_column,
    parse_count,
    prefix_ids_of,
    read_csv,
    read_json_rows,
)

logger = logging.getLogger(__name__)

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens named by one Mooncake hash id."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request; in a ``Trace`` lengths are at least 1, and ``arrival_s`` counts from its first request.

    ``prefix_ids`` name the prompt's leading blocks: equal leading ids mean equal leading text. Empty if unknown.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TraceClock:
    """Reads a trace's times, in ``units_per_s`` or as dates, as seconds from one origin; refuses both in one file."""

    def __init__(self, units_per_s: int = 1) -> None:
        self._units_per_s = units_per_s
        self._has_dates: bool | None = None

    @property
    def unit(self) -> str:
        """The name of the unit of times that are numbers."""
        return "milliseconds" if self._units_per_s == 1000 else "seconds"

    @property
    def has_numbers(self) -> bool:
        """Whether the times that were read are numbers."""
        return self._has_dates is False

    def seconds(self, value: object, where: str) -> float:
        """Seconds; dates without an offset are in UTC. Raises UserError for other text, or the other kind of time."""
        text = str(value).strip()
        is_date = False
        try:
            seconds = float(text) / self._units_per_s
        except ValueError:
            is_date, seconds = True, _seconds_of_date(text)
        if not math.isfinite(seconds):
            shown = reprlib.repr(value)
            raise UserError(f"{where}: a timestamp must be a number of {self.unit} or an ISO date, not {shown}")
        if self._has_dates not in (None, is_date):
            raise UserError(f"{where}: some timestamps are numbers and some are dates: write all in one way")
        self._has_dates = is_date
        return seconds


def _seconds_of_date(text: str) -> float:
    """Seconds since 1970 in UTC; not a number if ``text`` is no date."""
    try:
        date = datetime.fromisoformat(re.sub(r"\s*(UTC|GMT)$", "+00:00", text))
    except ValueError:
        return math.nan
    return ((date if date.tzinfo else date.replace(tzinfo=UTC)) - _EPOCH).total_seconds()


TIME_COLUMNS = ("t_s", "timestamp")
MAX_SPAN_S = 1e9
"""Longest time from the first to the last request: more than these 30 years is a mistake in the file."""
MAX_TIME_S = 1e11
"""Latest start: in seconds since 1970 the year 5138, and milliseconds since then are beyond it from 1973 on."""
_LEAST_GAPS, _MOST_RATE, _MOST_GAP_S = 9, 1000.0, 100.0
"""From so many gaps on, a higher rate or a longer mean gap is probably a mistake: times in another unit."""
_SINCE_1970_S = (1e9 / 1000, 1e11 / 1000)
"""Starts of a trace whose times, read as milliseconds, are seconds since 1970, from 2001 on."""
_JSON_KEYS = ("timestamp", "input_length", "output_length")
_TEXT_KEYS = ("conversations", "messages", "payload", "prompt", "text", "text_input")
_REFUSED_KEYS = {
    "branches": "a replay sends every row at its own time",
    "chat_id": "Qwen-Bailian traces count seconds, and blocks of 16 tokens: convert them to Mooncake's form",
    "delay": "a replay does not wait for the answer before: give the row a timestamp",
    "tool_events": "a replay sends every row at its own time",
    "tool_wait_ms": "a replay sends every row at its own time",
    "wait_for": "a replay sends every row at its own time",
}
"""Keys whose meaning a replay by arrival time does not support, with the reason."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival, the first at 0; the file's skipped rows record failures (no prompt or no output)."""

    rows: tuple[TraceRow, ...]
    num_skipped: int = 0

    def scaled(
        self,
        *,
        limit: int | None = None,
        speedup: float = 1.0,
        length_scale: float = 1.0,
        max_input: int | None = None,
        max_output: int | None = None,
    ) -> Trace:
        """The first ``limit`` rows, arriving ``speedup`` times faster, with lengths scaled and then cut, at least 1."""
        rows = tuple(
            replace(
                row,
                arrival_s=row.arrival_s / speedup,
                prompt_tokens=_scale(row.prompt_tokens, length_scale, max_input),
                output_tokens=_scale(row.output_tokens, length_scale, max_output),
            )
            for row in self.rows[:limit]
        )
        return replace(self, rows=rows)


def _scale(tokens: int, scale: float, maximum: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if maximum is None else min(scaled, maximum)


def load_trace(path: Path) -> Trace:
    """Read a trace.

    CSV: ``t_s`` (seconds) or ``timestamp`` (seconds or a date), with prompt and output tokens under our names or those
    of the Azure and BurstGPT files. ``.jsonl``: Mooncake's ``timestamp`` (ms or a date), ``input_length``,
    ``output_length`` and, optionally, ``hash_ids``. Dates are in UTC unless they carry an offset. Numbers that seem to
    be in another unit are a warning. Raises UserError if it is unreadable, or has wrong columns or keys, a key that a
    replay by arrival time does not support, or no usable row.
    """
    is_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    clock = TraceClock(1000 if is_json else 1)
    rows = list(_json_rows(path, clock) if is_json else _csv_rows(path, clock))
    usable = sorted((row for row in rows if row.prompt_tokens and row.output_tokens), key=lambda row: row.arrival_s)
    if not usable:
        raise UserError(f"{path} holds no request with a prompt and an output of at least one token")
    start_s = usable[0].arrival_s
    units = f": are its times in another unit? They are read as {clock.unit}" if clock.has_numbers else ""
    if not usable[-1].arrival_s - start_s <= MAX_SPAN_S:
        raise UserError(f"{path} spans more than {MAX_SPAN_S:g} seconds{units}")
    if abs(start_s) > MAX_TIME_S:
        raise UserError(f"{path} begins at {start_s:g} seconds{units}")
    if clock.has_numbers and (doubt := _find_doubt(usable, clock)):
        logger.warning("%s %s%s", path, doubt, units)
    shifted = tuple(replace(row, arrival_s=row.arrival_s - start_s) for row in usable)
    return Trace(shifted, num_skipped=len(rows) - len(usable))


def _find_doubt(rows: Sequence[TraceRow], clock: TraceClock) -> str | None:
    """What speaks against the unit of the times; None if nothing does. ``rows`` are in order of arrival."""
    start_s, num_gaps = rows[0].arrival_s, len(rows) - 1
    span_s = rows[-1].arrival_s - start_s
    if clock.unit == "seconds":
        is_slow = num_gaps >= _LEAST_GAPS and span_s / num_gaps > _MOST_GAP_S
        return f"has one request in {span_s / num_gaps:.0f} s" if is_slow else None
    if _SINCE_1970_S[0] <= start_s < _SINCE_1970_S[1]:
        return f"begins {start_s / 86400:.0f} days after 1970"
    is_fast = num_gaps >= _LEAST_GAPS and 0 < span_s < num_gaps / _MOST_RATE
    return f"has {num_gaps / span_s:.0f} requests/s" if is_fast else None


def _csv_rows(path: Path, clock: TraceClock) -> Iterator[TraceRow]:
    header, rows = read_csv(path)
    time_column = find_column(path, header, TIME_COLUMNS)
    prompt_column = find_column(path, header, PROMPT_COLUMNS)
    output_column = find_column(path, header, OUTPUT_COLUMNS)
    for where, row in rows:
        yield TraceRow(
            clock.seconds(row[time_column], where),
            parse_count(where, prompt_column, row[prompt_column]),
            parse_count(where, output_column, row[output_column]),
        )


def _json_rows(path: Path, clock: TraceClock) -> Iterator[TraceRow]:
    """The rows of a JSONL file or of a JSON list. A turn of a session with a ``timestamp`` arrives then."""
    for where, row in read_json_rows(path):
        _check_keys(where, row)
        yield TraceRow(
            clock.seconds(row["timestamp"], where),
            parse_count(where, "input_length", row["input_length"]),
            parse_count(where, "output_length", row["output_length"]),
            prefix_ids_of(row, where),
        )


def _check_keys(where: str, row: Mapping[str, Any]) -> None:
    given = {key for key, value in row.items() if value is not None}
    for text in _TEXT_KEYS:
        if text in given:
            raise UserError(f"{where} has texts under {text}: give the file as --prompts, with --request-rate")
    for key, reason in _REFUSED_KEYS.items():
        if row.get(key) and not (key == "delay" and "timestamp" in given):
            raise UserError(f"{where} has {key}, which cannot be replayed: {reason}")
    if row.get("block_size", MOONCAKE_BLOCK_TOKENS) != MOONCAKE_BLOCK_TOKENS:
        raise UserError(f"{where}: block_size must be {MOONCAKE_BLOCK_TOKENS}, the tokens that a hash id names")
    if not given.issuperset(_JSON_KEYS):
        raise UserError(f"{where} has keys {listed(row)}; it needs {', '.join(_JSON_KEYS)}")
