"""Values in place of those of a scenario's file: ``--set KEY=VALUE`` and ``--sweep KEY=A,B,C``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.yaml_file import parse_yaml

MAX_SWEEP = 1000


def sweep_of(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The ``sets`` of each run of ``--sweep key=a,b``: all combinations, the last key fastest; one without any."""
    runs: list[tuple[str, ...]] = [()]
    for text in texts:
        key, equals, rest = text.partition("=")
        values = _split(rest)
        if not key or not equals or not all(values):
            raise UserError(f"--sweep {text!r} must read KEY=A,B,C")
        if any(each.startswith(f"{key}=") for each in runs[0]):
            raise UserError(f"--sweep names {key} twice: give all of its values at once")
        runs = [(*run, f"{key}={value}") for run in runs for value in values]
        if len(runs) > MAX_SWEEP:
            raise UserError(f"--sweep asks for more than {MAX_SWEEP} runs")
    return runs


def _split(text: str) -> list[str]:
    """The text cut at the commas that are in no list or mapping."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def states_key(content: Mapping[str, Any], text: str) -> bool:
    """Whether the content has the key of ``KEY=VALUE``."""
    place: Any = content
    for name in text.partition("=")[0].split("."):
        if not isinstance(place, Mapping) or name not in place:
            return False
        place = place[name]
    return True


def is_set(place: str, written: Mapping[str, Any], sets: Sequence[str]) -> bool:
    """Whether one of ``KEY=VALUE`` states the value at ``place``, or a part that has it, or is in a part of its own."""
    keys = [text.partition("=")[0] for text in sets]
    if any(f"{place}.".startswith(f"{key}.") for key in keys):
        return True
    return not states_key(written, place) and any(key.startswith(f"{place}.") for key in keys)


def with_value(content: Mapping[str, Any], text: str, max_depth: int) -> dict[str, Any]:
    """The content with one value changed: ``a.b=1``, the value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r} must read KEY=VALUE")
    changed: dict[str, Any] = dict(content)
    place, names = changed, key.split(".")
    for name in names[:-1]:
        inner = place.get(name) or {}
        if not isinstance(inner, Mapping):
            raise UserError(f"--set {key}: {name} has no keys")
        place[name] = dict(inner)
        place = place[name]
    place[names[-1]] = parse_yaml(value, f"--set {key}", max_depth)
    return changed
