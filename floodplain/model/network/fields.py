"""A mapping from a model's file that records which keys are read: a model with an unread key is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from floodplain.core.errors import UserError

MAX_WHOLE: Final = 2**53
"""Largest accepted whole number of a file: larger than any size of a model, and exact as a float."""
_MOST_NAMED: Final = 5
_LONGEST_KEY: Final = 80
_REQUIRED: Final = object()


class Fields:
    """The keys of one mapping, read by type. A ``UserError`` names the file ``where``, and the key with ``prefix``."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def value(self, key: str, default: object = _REQUIRED) -> Any:
        """The value of any type; ``default`` if the key is absent (None counts as a value)."""
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        if default is _REQUIRED:
            raise UserError(f"{self.where}: the field {self._prefix + key!r} is missing")
        return default

    def whole(self, key: str, default: object = _REQUIRED, *, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_WHOLE:
            raise self.refusal(key, f"must be a whole number from {least} on")
        return value

    def whole_or_none(self, key: str, default: int | None = None) -> int | None:
        """A whole number, or None for ``null``; ``default`` if the key is absent."""
        return None if self.value(key, default) is None else self.whole(key, default)

    def number(self, key: str, default: object = _REQUIRED, *, may_be_zero: bool = False) -> float:
        """A finite number above 0, or from 0 on if it ``may_be_zero``."""
        value = self.value(key, default)
        least = 0.0 if may_be_zero else math.ulp(0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value) or value < least:
            raise self.refusal(key, f"must be a number {'from 0 on' if may_be_zero else 'above 0'}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A finite number above 0, or None if the key is absent or ``null``."""
        return None if self.value(key, None) is None else self.number(key, None)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """``length`` finite numbers above 0."""
        value = self.value(key)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self.refusal(key, f"must be a list of {length} numbers")
        return tuple(Fields({key: one}, self.where, self._prefix).number(key) for one in value)

    def flag(self, key: str, default: object = _REQUIRED) -> bool:
        """True or false."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return value

    def text(self, key: str, default: object = _REQUIRED) -> str:
        """A string."""
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "must be a string")
        return value

    def token_ids(self, key: str) -> frozenset[int]:
        """A token or several; empty if the key is absent or ``null``."""
        value = self.value(key, None)
        many = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in many):
            raise self.refusal(key, "must be a token id or a list of token ids")
        return frozenset(many)

    def child(self, key: str) -> Fields | None:
        """The mapping under ``key``; None if the key is absent, ``null`` or an empty mapping."""
        value = self.value(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(key, "must be an object")
        return Fields(value, self.where, f"{self._prefix}{key}.") if value else None

    def require(self, key: str, *allowed: object) -> None:
        """Refuse every value except ``allowed``; an absent key counts as the first of these."""
        value = self.value(key, allowed[0])
        if not any(_is_same(value, one) for one in allowed):
            raise self.refusal(key, "is not supported, only " + " or ".join(repr(one) for one in allowed))

    def refusal(self, key: str, reason: str) -> UserError:
        """An error about the value of ``key``."""
        return UserError(f"{self.where}: {self._label(key)}={_short(self._values.get(key))} {reason}")

    def refuse_unread(
        self,
        known: Collection[str] = (),
        neutral: Mapping[str, tuple[object, ...]] = MappingProxyType({}),
        pattern: str = r"(?!)",
        because: str = "no code reads this key, so the model would be computed without it",
    ) -> None:
        """Raise UserError, with ``because``, if keys that were not read have a value.

        Keys that change no number are ``known``, ``neutral`` at these values, or match ``pattern``.
        """
        rest = [key for key in self._values if key not in self._read and key not in known]
        unread = [key for key in rest if not re.fullmatch(pattern, key) and not self._is_neutral(key, neutral)]
        if unread:
            named = [f"{self._label(key)}={_short(self._values[key])}" for key in sorted(unread)[:_MOST_NAMED]]
            raise UserError(
                f"{self.where}: {', '.join(named)} is not supported: {because}; "
                "remove the key if the model does not need it"
            )

    def _label(self, key: str) -> str:
        """The key as it is if it is one short line, else shortened."""
        return self._prefix + (key if len(key) <= _LONGEST_KEY and re.fullmatch(r"[\w.*-]+", key) else _short(key))

    def _is_neutral(self, key: str, neutral: Mapping[str, tuple[object, ...]]) -> bool:
        value = self._values[key]
        return value is None or any(_is_same(value, one) for one in neutral.get(key, ()))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _is_same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
