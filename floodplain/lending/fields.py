"""Reads fields of untrusted JSON: each has its type and its range, or the whole answer is refused.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_COUNT = 2**63 - 1
"""The largest number that a store holds."""
MAX_SECONDS = 86400.0
"""The longest deadline; a TTL is shorter."""
MAX_DETAIL_CHARS = 1000

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a member. It becomes the name of a device's file, so it has no slash."""
IDENTITY = re.compile(r"[!-~]{1,128}")
"""Of a lease, or of a process."""
MARK = re.compile(r"[0-9a-f]{1,32}\.[0-9]{1,19}")
"""Of a member's last news."""
REASON = re.compile(r"[ -~]{0,200}")


class WireError(ValueError):
    """A value that no coordinator of this version sends. The message names the field, and shows no value."""


class WireFields:
    """The fields of a JSON object.

    Args:
        value: As received.
        where: What the object is: errors begin with it.

    Raises:
        WireError: It is not an object. Every method raises this if the field is missing or invalid.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise WireError(f"{where} is not a JSON object")
        self._values: Mapping[str, Any] = value
        self._where = where

    def count(self, name: str, least: int = 0, default: int | None = None) -> int:
        """Return a whole number from ``least`` to ``MAX_COUNT``; the default, if given, if the field is missing."""
        value = self._values.get(name, default) if default is not None else self.get(name)
        if type(value) is not int or not least <= value <= MAX_COUNT:
            raise self._wrong(name, f"a whole number from {least} to {MAX_COUNT}")
        return value

    def seconds(self, name: str, least: float = 0.0, most: float = MAX_SECONDS) -> float:
        """Return a finite number in a range."""
        value = self.get(name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self._wrong(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return true or false; the default, if given, if the field is missing."""
        value = self._values.get(name, default) if default is not None else self.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        """Return a string that the pattern matches as a whole."""
        value = self.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self._wrong(name, f"a string like {pattern.pattern}")
        return value

    def line(self, name: str) -> str:
        """Return a printable string of at most ``MAX_DETAIL_CHARS``."""
        value = self.get(name)
        if not isinstance(value, str) or len(value) > MAX_DETAIL_CHARS or not value.isprintable():
            raise self._wrong(name, f"one printable line of at most {MAX_DETAIL_CHARS} characters")
        return value

    def one_of(self, name: str, allowed: Mapping[str, Any]) -> Any:
        """Return the value that ``allowed`` has for a string."""
        value = self.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self._wrong(name, "one of " + ", ".join(allowed))
        return allowed[value]

    def items(self, name: str) -> Sequence[Any]:
        """Return a list."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; JSON's keys are strings."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return value

    def get(self, name: str) -> Any:
        """Return a field of any type."""
        if name not in self._values:
            raise WireError(f"{self._where} has no {name}")
        return self._values[name]

    def _wrong(self, name: str, wanted: str) -> WireError:
        return WireError(f"{name} of {self._where} is not {wanted}")
