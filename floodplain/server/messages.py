"""The turns of a conversation, as clients send them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from floodplain.server.fields import IGNORED_IN_MESSAGES, IGNORED_IN_PARTS, OFF_IN_MESSAGES, Body, Off
from floodplain.server.shapes import TEXT, TEXTS, kind_of_text


class TextPart(Body):
    """A piece of a message."""

    ignores: ClassVar[frozenset[str]] = IGNORED_IN_PARTS

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(min_length=1), Tag(TEXTS)],
    Discriminator(
        kind_of_text, custom_error_type="content", custom_error_message="should be a string or a list of text parts"
    ),
]


class Message(Body):
    """One turn of a conversation."""

    off: ClassVar[Off] = OFF_IN_MESSAGES
    ignores: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @property
    def ignored_fields(self) -> set[str]:
        """The fields of the message and its parts that were given and ignored."""
        parts = self.content if isinstance(self.content, list) else ()
        return {f"messages.{name}" for part in (self, *parts) for name in part.ignored}

    def templated(self) -> dict[str, str]:
        """The message in the form of chat templates: ``developer`` is a newer name of ``system``."""
        parts = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}
