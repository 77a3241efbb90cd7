"""Fields of dataclasses that the command line shows as flags, and what their checks share."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from floodplain.core.errors import UserError, flag_name


def flag(default: object, help_text: str, **facts: object) -> Any:
    """A field with a default that is a flag; ``cli/options.py`` has the meaning of further ``facts`` (``metavar``)."""
    return field(default=default, metadata={"help": help_text, **facts})


def changed(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, with their values; one without a default differs."""
    return {one.name: value for one in fields(config) if (value := getattr(config, one.name)) != one.default}


def check_choices(config: Any) -> None:
    """Raise UserError if a field's value is none of the flag's ``choices``, and not its default, such as None."""
    for one in fields(config):
        choices, value = one.metadata.get("choices"), getattr(config, one.name)
        if choices is not None and value not in (*choices, one.default):
            raise UserError(f"{flag_name(one.name)} must be one of {', '.join(choices)}, not {value!r}")


def check_between(config: Any, name: str, least: float, most: float, unit: str = "") -> None:
    """Raise UserError if a field is not between two bounds, both inclusive; None is a default, and in any range."""
    value = getattr(config, name)
    if value is not None and not least <= value <= most:
        limits = f"between {least} and {most}{unit and ' '}{unit}"
        raise UserError(f"{flag_name(name)} must be {limits}, not {value}")
