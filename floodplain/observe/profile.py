"""A profile as text, and as the output of ``floodplain profile``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from floodplain.files.profile import Profile
from floodplain.observe.table import format_table
from floodplain.observe.terminal import say

SIZE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
"""Units of sizes; a size is written in the largest that it reaches."""


def save_and_show(profile: Profile, out: Path | None, output_format: str) -> None:
    """Write the profile to ``out`` if given, and print it even if that raises WriteFailed."""
    from floodplain.observe.strict_json import save_result, to_json  # imports numpy

    document = profile.to_json()
    try:
        if out is not None:
            save_result(out, document)
    finally:
        say(to_json(document) if output_format == "json" else describe_profile(profile))


def describe_profile(profile: Profile) -> str:
    """A profile as text: subject, machine and time; the result; the tries."""
    how = "computed from a step line for" if profile.is_virtual else "measured on"
    head = f"{profile.kind} profile of {profile.subject}, {how} {profile.machine}, {profile.made_at}"
    facts = format_table(["result", ""], [[key, format_fact(key, value)] for key, value in _facts(profile)])
    return "\n\n".join([head, facts, *([_tries(profile)] if profile.tries else [])])


def format_fact(key: str, value: Any) -> str:
    """A value for people: sizes (by the key's suffix) with units, numbers with four digits."""
    if key.endswith("_bytes") and isinstance(value, int):
        size, unit = next((each for each in SIZE_UNITS if abs(value) >= each[0]), SIZE_UNITS[-1])
        return f"{value / size:.4g} {unit}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _facts(profile: Profile) -> list[tuple[str, Any]]:
    return list(_flat({**profile.result, **profile.errors}))


def _flat(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of all values; keys of a nested mapping are joined by dots."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield key, value


def _tries(profile: Profile) -> str:
    columns = list(dict.fromkeys(key for row in profile.tries for key in row if not isinstance(row[key], Mapping)))
    rows = [[format_fact(key, row.get(key)) for key in columns] for row in profile.tries]
    return format_table(columns, rows)
