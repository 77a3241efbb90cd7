"""Names the variable or the file that set a refused value, for which errors give the flag."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from floodplain.core.errors import UserError

_LEAST_LETTERS = 3
"""A shorter value may stand in a message by chance."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the value of a flag came from, if not from the command line.

    Attributes:
        name: The variable or the file.
        options: How the flag is spelled, or what the argument is called.
        value: As text.
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
