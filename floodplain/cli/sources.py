"""Adds to an error about a flag the variable or file that set its value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from floodplain.core.errors import UserError

_LEAST_LETTERS = 3
"""Shorter values may be in a message by chance."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a flag's value, if not the command line.

    Attributes:
        name: Name of the variable or the file.
        options: The spellings of the flag, or the name of the argument.
        value: The value as text.
    """

    name: str
    options: tuple[str, ...]
    value: str

    def is_flag_in(self, message: str) -> bool:
        """Whether a message names the flag."""
        return any(re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", message) for option in self.options)

    def is_value_in(self, message: str) -> bool:
        """Whether a message quotes the value."""
        return len(self.value) >= _LEAST_LETTERS and self.value in message


def name_sources(error: UserError, sources: Iterable[Source]) -> UserError:
    """``error`` with the sources of the flags that it names, or else of the values that it quotes."""
    message, known = str(error), list(sources)
    meant = [one for one in known if one.is_flag_in(message)] or [one for one in known if one.is_value_in(message)]
    told = ", ".join(f"{one.options[0]} is set by {one.name}" for one in meant)
    return UserError(f"{message} ({told})") if told else error
