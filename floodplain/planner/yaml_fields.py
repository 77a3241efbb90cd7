"""Reads fields of a user's mapping: each is taken once and checked, and unknown ones are refused by name."""

from __future__ import annotations

import re
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.sizes import parse_size
from floodplain.files.parsing import listed

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
"""Of a server or a model: a server's with ``-gpu99`` appended is still a valid name of a coordinator's member."""
_MISSING = object()


class Fields:
    """Takes checked fields from one mapping.

    Args:
        content: The value in the file.
        source: The file, and the place in it: errors begin with it.

    Raises:
        UserError: It is not a mapping.
    """

    def __init__(self, content: Any, source: str) -> None:
        if not isinstance(content, dict):
            raise UserError(f"{source} must hold KEY: VALUE")
        self._left: dict[Any, Any] = dict(content)
        self._known: list[str] = []
        self.source = source

    def name(self, key: str) -> str:
        """Return a name, which must be there."""
        value = self._take(key, _MISSING)
        if not isinstance(value, str) or not NAME.fullmatch(value):
            self.refuse(key, f"must be 1 to 48 letters, digits, '.', '_' or '-', not {value!r:.60}")
        return str(value)

    def names(self, key: str) -> frozenset[str] | None:
        """Return a set of names, or of one; None if the key is missing."""
        value = self._take(key, None)
        values = value if isinstance(value, list) else [value]
        if value is None:
            return None
        if not values or not all(isinstance(each, str) for each in values):
            self.refuse(key, "must be a list of names")
        return frozenset(values)

    def count(self, key: str, default: int | None, least: int = 1, most: int = 2**18) -> int:
        """Return a whole number."""
        value = self._take(key, _MISSING if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, f"must be a whole number between {least} and {most}, not {value!r:.60}")
        return int(value)

    def part(self, key: str, default: float) -> float:
        """Return a number between 0 and 1."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.refuse(key, f"must be between 0 and 1, not {value!r:.60}")
        return float(value)

    def size(self, key: str, most_bytes: int, *, is_needed: bool = False) -> int:
        """Return a size such as ``80GB``; 0 if it is not there and need not be."""
        value = self._take(key, _MISSING if is_needed else None)
        if value is None:
            return 0
        try:
            num_bytes = parse_size(str(value))
        except UserError as error:
            self.refuse(key, str(error))
        if num_bytes > most_bytes:
            self.refuse(key, f"is out of range: {value!r:.60}")
        return num_bytes

    def text(self, key: str) -> str | None:
        """Return any text; None if it is not there."""
        value = self._take(key, None)
        if not isinstance(value, str | None):
            self.refuse(key, "must be text")
        return None if value is None else str(value)

    def rows(self, key: str, *, is_needed: bool = False) -> list[Any]:
        """Return a list; empty if it is not there and need not be."""
        value = self._take(key, _MISSING if is_needed else [])
        if not isinstance(value, list) or (is_needed and not value):
            self.refuse(key, "must be a list" + (" of at least one" if is_needed else ""))
        return list(value)

    def finish(self) -> None:
        """Refuse the keys that were not taken.

        Raises:
            UserError: There are some.
        """
        if self._left:
            unknown = listed(repr(key) for key in self._left)
            raise UserError(f"{self.source}: unknown key {unknown}; there are {', '.join(self._known)}")

    def refuse(self, key: str, problem: str) -> Any:
        """Raise a ``UserError`` about a field."""
        raise UserError(f"{self.source}: {key} {problem}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is _MISSING:
            raise UserError(f"{self.source}: {key} is missing")
        return value
