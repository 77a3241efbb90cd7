"""The message of a validation error: which part of the body is wrong, and how."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

BRANCH = "<branch>"
"""Prefix of the tags of our unions, which appear in an error's location but are no part of the body."""


def first_problem(problems: Sequence[Mapping[str, Any]], unsupported: Mapping[str, str]) -> tuple[str, str | None]:
    """(message, field) of the first error.

    Args:
        problems: Pydantic's errors, with the body as the first part of every location.
        unsupported: Fields that are known and not supported, with the values at which they are accepted.
    """
    problem = problems[0]
    kind, path = problem["type"], _path_of(problem)
    if not path:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    where, param = ".".join(path), path[0]
    if kind == "missing":
        return f"{where} is required", param
    if kind == "extra_forbidden" and path[-1] in unsupported:
        off = unsupported[path[-1]]
        return f"{where} is not supported: leave it out" + (f", or give {off}" if off else ""), param
    if kind == "extra_forbidden":
        return f"{where} is not a supported field: leave it out", param
    return _complaint(where, str(problem["msg"]), problem.get("input")), param


def _path_of(problem: Mapping[str, Any]) -> list[str]:
    path = [str(part) for part in problem["loc"][1:]]
    named = path[-1:] if problem["type"] == "extra_forbidden" else []  # chosen by the client: may look like a tag
    places = path[:-1] if named else path
    return [*(place for place in places if not place.startswith(BRANCH)), *named]


def _complaint(where: str, message: str, given: object) -> str:
    """Pydantic's message as a sentence about the field, with the given value if the message lacks it."""
    wish = re.sub(r"^(Input|List|String|Dictionary) (?=should )", "", message).replace(" after validation", "")
    wish = re.sub(r"a valid dictionary or instance of \w+", "an object", wish)
    if not wish.startswith("should "):
        return f"{where}: {wish}"
    return f"{where} {wish}" if ", not " in wish else f"{where} {wish}, not {_shown(given)}"


def _shown(given: object) -> str:
    match given:
        case dict():
            return "an object"
        case list():
            return "a list"
        case None | bool() | int() | float() | str():
            return json.dumps(given) if given is None or isinstance(given, bool) else reprlib.repr(given)
        case _:
            return f"a {type(given).__name__}"
