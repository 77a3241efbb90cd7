"""The model's turn in a conversation: its text and its calls, piece by piece or as a whole."""

from __future__ import annotations

import uuid
from typing import Any

from floodplain.server.tool_parsers import Arguments, Begin, Parser, Piece, Text


class Turn:
    """One choice's turn. Without a parser all is text."""

    def __init__(self, parser: Parser | None, max_calls: int | None = None) -> None:
        self._parser, self._max_calls = parser, max_calls
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def pieces(self, text: str, *, is_last: bool) -> list[Piece]:
        """What is certain after more text, in order, without the calls that are too many."""
        if self._parser is None:
            return [Text(text)] if text else []
        found = self._parser.feed(text) + (self._parser.end() if is_last else [])
        return [piece for piece in found if self._counts(piece)]

    def _counts(self, piece: Piece) -> bool:
        self._num_calls += isinstance(piece, Begin)
        return isinstance(piece, Text) or self._max_calls is None or self._num_calls <= self._max_calls

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The fields of a streamed message after more text: ``content``, ``tool_calls``, either or none."""
        if self._parser is None:
            return {"content": text}
        num_calls = self._num_calls
        content, calls = "", list[dict[str, Any]]()
        for piece in self.pieces(text, is_last=is_last):
            if isinstance(piece, Text):
                content += piece.text
                continue
            num_calls += isinstance(piece, Begin)
            calls.append({"index": num_calls - 1, **_call(piece)})
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
        return {"content": found.get("content", None if calls else ""), "tool_calls": calls or None}


def _call(piece: Begin | Arguments) -> dict[str, Any]:
    if isinstance(piece, Arguments):
        return {"function": {"arguments": piece.text}}
    return {"id": new_call_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}}


def new_call_id() -> str:
    """Return nine letters and digits, which the templates of Mistral's models ask for."""
    return uuid.uuid4().hex[:9]
