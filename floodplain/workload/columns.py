"""Reads tables from files by column names, with the names of several data sets."""

from __future__ import annotations

import csv
import io
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import listed, parse_json
from floodplain.files.reading import read_text

MAX_TABLE_BYTES = 2**31
"""Largest trace, pool of lengths or file of prompts."""
PROMPT_COLUMNS = ("prompt_tokens", "contexttokens", "request tokens", "input_length")
OUTPUT_COLUMNS = ("output_tokens", "generatedtokens", "response tokens", "output_length")
MOST_TOKENS = 10**9
"""Most tokens of one prompt or output: more is a mistake in the file."""


def read_csv(path: Path) -> tuple[tuple[str, ...], Iterator[tuple[str, dict[str, str]]]]:
    """The column names (lower case, stripped) of a CSV file, and (where, row) of its lines, one by one.

    Raises UserError if it is not a whole table: the second part when that line is read.
    """
    lines = csv.reader(io.StringIO(read_text(path, MAX_TABLE_BYTES), newline=""), strict=True)
    found = _read_lines(path, lines)
    header = tuple(name.strip().lower() for name in next(found, []))
    if not header:
        raise UserError(f"{path} is empty: expected a line with column names")
    if wrong := [sign for sign in ";\t|" if len(header) == 1 and sign in header[0]]:
        raise UserError(f"{path} separates columns by {wrong[0]!r}, and commas are read: replace them")
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{path} has two columns {twice[0]}: leave one of them out")
    return header, _read_rows(path, lines, found, header)


def _read_lines(path: Path, lines: Any) -> Iterator[list[str]]:
    """The values of each line that is not blank; ``lines`` is a ``csv.reader``."""
    try:
        yield from (values for values in lines if any(map(str.strip, values)))
    except csv.Error as error:
        raise UserError(f"{path} line {lines.line_num} is not CSV: {error}") from error


def _read_rows(
    path: Path, lines: Any, found: Iterable[list[str]], header: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    for values in found:
        where = f"{path} line {lines.line_num}"
        if len(values) != len(header):
            raise UserError(f"{where}: {len(values)} values under {len(header)} column names")
        yield where, dict(zip(header, values, strict=True))


def read_json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (where, object) for each line of a JSONL file or item of a JSON list. Raises UserError for others."""
    text = read_text(path, MAX_TABLE_BYTES)
    if text.lstrip().startswith("["):
        document = parse_json(text, path, keys_once=True)
        rows = ((f"{path} item {number}", row) for number, row in enumerate(document, start=1))
    else:
        lines = ((f"{path} line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip())
        rows = ((where, parse_json(line, where, keys_once=True)) for where, line in lines)
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object")
        yield where, row


def prefix_ids_of(row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The ``hash_ids`` of a row; empty if it has none. Raises UserError unless they are a list of whole numbers."""
    prefix_ids = row.get("hash_ids")
    if prefix_ids is None:
        return ()
    if not (isinstance(prefix_ids, list) and all(type(i) is int and i >= 0 for i in prefix_ids)):
        raise UserError(f"{where}: hash_ids must be a list of whole numbers")
    return tuple(prefix_ids)


def find_column(path: Path, header: Sequence[str], names: Sequence[str]) -> str:
    """The first of ``names`` in the header. Raises UserError, with the file's columns and ``names``, if none is."""
    for name in names:
        if name in header:
            return name
    raise UserError(f"{path} has columns {listed(header)}; it needs one of: {', '.join(names)}")


def parse_count(where: str, name: str, value: object) -> int:
    """A token count, at most ``MOST_TOKENS`` (``12``, ``"12"``, ``"12.0"``). Raises UserError for other values."""
    if not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            count = float(value)
        except (ValueError, OverflowError):
            count = -1.0
        if 0 <= count <= MOST_TOKENS and count.is_integer():
            return int(count)
    shown = reprlib.repr(value)
    raise UserError(f"{where}: {name} must be a whole number of tokens, 0 or more (at most {MOST_TOKENS}), not {shown}")
