"""Turns every exception of a parser of a user's file into a one-line error that names the file."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from floodplain.core.errors import InvariantError, UserError
from floodplain.files.reading import read_text

MAX_JSON_BYTES = 2**26
"""Largest JSON file. The largest known ones, indices of checkpoints with many shards, have a few MB."""
_MAX_REASON = 200
_MAX_NAMES, _MAX_NAME = 16, 40
_RUST_PANIC = "PanicException"  # of pyo3, for a bug in a parser written in Rust; derives from BaseException


@contextmanager
def parsing(source: object, fault: str = "cannot be read") -> Iterator[None]:
    """Turn every exception in this context into a ``UserError`` that begins with ``source`` and says ``fault``.

    Parsers raise anything on a hostile file: RecursionError, OverflowError, MemoryError, IndexError, a panic of Rust
    code. A UserError passes, as do an interruption and what only our bugs cause (InvariantError, NameError).
    """
    try:
        yield
    except (UserError, InvariantError, NameError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise UserError(f"{source}: {fault} ({reason_of(error)})") from error


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Hold standard error back, and drop it if a parser in Rust panics, which prints dozens of lines first."""
    try:
        stderr, held = os.dup(2), os.memfd_create("stderr")
    except OSError:  # standard error is closed: nothing is printed
        yield
        return
    has_panicked = False
    os.dup2(held, 2)
    try:
        yield
    except BaseException as error:
        has_panicked = _is_panic(error)
        raise
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(stderr, 2)
        os.lseek(held, 0, os.SEEK_SET)
        with os.fdopen(held, "rb") as source, os.fdopen(stderr, "wb") as target:
            if not has_panicked:
                target.write(source.read())


def reason_of(error: BaseException) -> str:
    """An exception's message in one line of bounded length; with its type if the message says too little."""
    message = " ".join(str(error).split())[:_MAX_REASON]
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ValueError) and "set_int_max_str_digits" in str(error):
        return "a number has too many digits"
    if isinstance(error, OSError | ValueError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def listed(names: Iterable[object]) -> str:
    """Names from a file, separated by commas, for a message: their number and lengths are bounded."""
    shown = [str(name) for name in islice(names, _MAX_NAMES + 1)]
    parts = [name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…" for name in shown[:_MAX_NAMES]]
    return ", ".join([*parts, *(["…"] if len(shown) > _MAX_NAMES else [])]) or "(none)"


def parse_json(text: str, source: object, *, keys_once: bool = False) -> Any:
    """The value of a JSON text. NaN, Infinity and numbers beyond a float are refused.

    ``keys_once`` refuses a duplicate key in an object; else the last one counts. Raises UserError, which begins with
    ``source``, if the text is not JSON or is nested too deeply.
    """
    with parsing(source):
        try:
            return (_ONCE_DECODER if keys_once else _DECODER).decode(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source} is not JSON: {error.msg} (character {error.pos})") from error


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES, *, keys_once: bool = True) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it cannot be read, is not JSON, or is not an object."""
    content = parse_json(read_text(path, max_bytes), path, keys_once=keys_once)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == _RUST_PANIC


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {key!r:.60} stands twice in an object: leave one of them out")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
_ONCE_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, object_pairs_hook=_once)
