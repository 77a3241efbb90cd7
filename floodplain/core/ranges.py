"""Bounds of fields that another process fills: ``Annotated[int, Range(0, 9)]``. Readers of messages check them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import Annotated

MAX_COUNT, MAX_TOKEN_ID = 2**63 - 1, 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both inclusive. NaN is in no range."""

    least: float
    most: float

    def problem(self, value: float) -> str | None:
        """Why a value does not fit; None if it does."""
        return None if self.least <= value <= self.most else f"not from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class Text:
    """Bounds of a string: its most characters, and whether it must be one printable line."""

    most: int
    is_line: bool = True

    def problem(self, value: str) -> str | None:
        """Why a value does not fit; None if it does."""
        if len(value) > self.most:
            return f"longer than {self.most} characters"
        if self.is_line and not value.isprintable():
            return "not one printable line"
        return None if value.isascii() or value.isprintable() or _is_unicode(value) else "not Unicode"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Bounds of a string: the regular expression that matches it as a whole."""

    expression: str

    def problem(self, value: str) -> str | None:
        """Why a value does not fit; None if it does."""
        return None if re.fullmatch(self.expression, value) else f"not a string like {self.expression}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Bounds of a string: one of ``values``."""

    values: tuple[str, ...]

    def problem(self, value: str) -> str | None:
        """Why a value does not fit; None if it does."""
        return None if value in self.values else f"none of {', '.join(self.values)}"


@dataclass(frozen=True, slots=True)
class Address:
    """Bounds of a string: ``HOST:PORT``."""

    def problem(self, value: str) -> str | None:
        """Why a value does not fit; None if it does."""
        host, _, port = value.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 2**16
        return None if is_port and host and len(host) < 300 and host.isprintable() else "not HOST:PORT"


@dataclass(frozen=True, slots=True)
class Length:
    """Bounds of a list or a dict: the most items, and the least."""

    most: int
    least: int = 0

    def problem(self, value: tuple[object, ...] | dict[object, object]) -> str | None:
        """Why a value does not fit; None if it does."""
        if len(value) < self.least:
            return f"fewer than {self.least} items"
        return None if len(value) <= self.most else f"more than {self.most} items"


@dataclass(frozen=True, slots=True)
class Added:
    """Mark of a field that older versions lack: an object without it has the default (``core.codec``). No bound."""


ADDED = Added()


def _is_unicode(value: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in value)


COUNT, SECONDS = Range(0, MAX_COUNT), Range(0.0, 1e12)
NAME, ITEMS, ENTRIES = Text(4096, is_line=False), Length(2**20), Length(1024)
"""Default bounds of fields of type int, float, str, tuple and dict."""

Line = Annotated[str, Text(1000)]
HostPort = Annotated[str, Address()]
Secret = Annotated[str, Pattern("[0-9a-f]{64}")]
Port = Annotated[int, Range(1, 65535)]
Positive = Annotated[int, Range(1, 2**40)]
"""A size that something is divided by, or multiplied with."""
TokenId = Annotated[int, Range(0, MAX_TOKEN_ID)]
LogProbability = Annotated[float, Range(-inf, 1e-3)]
"""Rounding may lift a certain token's above zero."""
