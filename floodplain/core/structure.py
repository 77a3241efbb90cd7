"""What a structured answer must look like, as a description: the engine of each process makes its own masks of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from floodplain.core.errors import UserError
from floodplain.core.ranges import Text

MAX_STRUCTURE_CHARS = 2**16
"""The most characters of a schema, a grammar or a list of choices."""


class StructureKind(StrEnum):
    """How a structure is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Structure:
    """The texts that an answer may be: those of a JSON schema, a regular expression, a grammar or a list.

    UserError if it is longer than ``MAX_STRUCTURE_CHARS``.

    Attributes:
        content: A schema or a list as JSON, a regular expression of Rust's ``regex``, a grammar of llguidance's Lark.
    """

    kind: StructureKind
    content: Annotated[str, Text(MAX_STRUCTURE_CHARS, is_line=False)]

    def __post_init__(self) -> None:
        if len(self.content) > MAX_STRUCTURE_CHARS:
            length = f"{len(self.content)} characters, more than {MAX_STRUCTURE_CHARS}"
            raise UserError(f"the structure (response_format, structured_outputs) has {length}: simplify it")


ANY_OBJECT = Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}')
"""Any JSON object."""
