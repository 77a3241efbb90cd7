"""The model's turn in a conversation: its text and its calls, piece by piece or as a whole."""

from __future__ import annotations

import uuid
from typing import Any

from floodplain.server.tool_parsers import Arguments, Begin, Parser, Piece, Text


class Turn:
    """One choice's turn. Without a parser all is text.

    Attributes:
        has_calls: Whether a call has begun.
    """

    def __init__(self, parser: Parser | None, max_calls: int | None = None) -> None:
        self._parser, self._max_calls = parser, max_calls
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The fields of a streamed message after more text: ``content``, ``tool_calls``, either or none."""
        if self._parser is None:
            return {"content": text}
        pieces = self._parser.feed(text) + (self._parser.end() if is_last else [])
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        calls = [call for piece in pieces if (call := self._call(piece)) is not None]
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of a whole message."""
        found = self.delta(text, is_last=True)
        calls: list[dict[str, Any]] = []
        for piece in found.get("tool_calls", ()):
            if "id" in piece:
                calls.append(piece)
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        for call in calls:
            del call["index"]
        return {"content": found.get("content"), "tool_calls": calls or None}

    def _call(self, piece: Piece) -> dict[str, Any] | None:
        if isinstance(piece, Begin):
            self._num_calls += 1
        index = self._num_calls - 1
        if isinstance(piece, Text) or (self._max_calls is not None and index >= self._max_calls):
            return None
        if isinstance(piece, Arguments):
            return {"index": index, "function": {"arguments": piece.text}}
        function = {"name": piece.name, "arguments": ""}
        return {"index": index, "id": _new_id(), "type": "function", "function": function}


def _new_id() -> str:
    """Nine letters and digits, which the templates of Mistral's models ask for."""
    return uuid.uuid4().hex[:9]
