"""A profile as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from floodplain.core.sizes import format_size
from floodplain.files.profile import Profile
from floodplain.observe.table import format_table

_SHORT = len("1234KiB")
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1, "B"))


def describe_profile(profile: Profile) -> str:
    """What was measured, on what and when; the result; what was tried."""
    how = "computed from a step line for" if profile.is_virtual else "measured on"
    head = f"{profile.kind} profile of {profile.subject}, {how} {profile.machine}, {profile.made_at}"
    facts = format_table(["", ""], [[key, format_fact(key, value)] for key, value in _facts(profile)])
    return "\n\n".join([head, facts, *([_tries(profile)] if profile.tries else [])])


def format_fact(key: str, value: Any) -> str:
    """A value as people read it: sizes by the name of their key, numbers with four digits."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"-{_size(-value)}" if value < 0 else _size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _size(num_bytes: int) -> str:
    """Exactly, if that is short; else with four digits."""
    exact = format_size(num_bytes)
    if len(exact) <= _SHORT:
        return exact
    unit, name = next((unit, name) for unit, name in _UNITS if num_bytes >= unit)
    return f"{num_bytes / unit:.4g}{name}"


def _facts(profile: Profile) -> list[tuple[str, Any]]:
    return list(_flat({**profile.result, **profile.errors}))


def _flat(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of all values; keys of a mapping within it follow its own key and a point."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield key, value


def _tries(profile: Profile) -> str:
    columns = list(dict.fromkeys(key for row in profile.tries for key in row if not isinstance(row[key], Mapping)))
    rows = [[format_fact(key, row.get(key)) for key in columns] for row in profile.tries]
    return format_table(columns, rows)
