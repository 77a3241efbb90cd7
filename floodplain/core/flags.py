"""Fields of dataclasses that the command line shows as flags."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def flag(default: object, help_text: str, **facts: object) -> Any:
    """A field with a default that is a flag; ``cli/options.py`` has the meaning of further ``facts`` (``metavar``)."""
    return field(default=default, metadata={"help": help_text, **facts})
