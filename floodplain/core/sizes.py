"""Sizes as people write them: ``256MiB``, ``4GB``, ``1048576``."""

from __future__ import annotations

import re
from fractions import Fraction

from floodplain.core.errors import UserError

MAX_SIZE_BYTES = 2**50
"""A pebibyte. A larger size is more than any machine's memory, so probably a wrong unit."""

_BINARY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
_UNITS = {name.lower(): num_bytes for name, num_bytes in {**_BINARY, **_DECIMAL}.items()}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """The bytes that ``text`` means; a number without unit is bytes. UserError unless 1 to ``MAX_SIZE_BYTES``."""
    match = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2] or "b") if match else None
    if match is None or unit is None:
        raise UserError(f"{text!r} is no size: write {_forms(match)}, or bytes")
    num_bytes = Fraction(match[1]) * unit
    if num_bytes.denominator != 1:
        raise UserError(f"{text!r} is not a whole number of bytes")
    if not 0 < num_bytes <= MAX_SIZE_BYTES:
        raise UserError(f"{text!r} is out of range: sizes lie between 1 byte and 1024TiB")
    return int(num_bytes)


def _forms(match: re.Match[str] | None) -> str:
    """Sizes that a number with a shortened unit, such as ``48M`` or Kubernetes' ``48Mi``, may stand for."""
    if match is None or f"{match[2]}b" not in _UNITS:
        return "256MiB, 4GB"
    number, letter = match[1], match[2][0].upper()
    return f"{number}{letter}iB" if match[2].endswith("i") else f"{number}{letter}iB, {number}{letter}B"


def format_size(num_bytes: int) -> str:
    """The shortest exact spelling: ``parse_size`` gives ``num_bytes`` back."""
    for name, unit in _BINARY.items():
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}B"


def show_size(num_bytes: int) -> str:
    """A measured size for people, to four digits: ``63.5 MiB``."""
    name, unit = next(((name, unit) for name, unit in _BINARY.items() if abs(num_bytes) >= unit), ("bytes", 1))
    return f"{num_bytes / unit:.4g} {name}"
