"""Reads function calls in a model's text while it is generated, in the forms that models were trained to write.

Every form is JSON behind a marker. The name of a call is known when its string ends; its arguments are passed on as
they come. A text that only looks like a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from floodplain.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """The name of the next call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the last call's arguments, a JSON object."""

    text: str


Piece = Text | Begin | Arguments


@dataclass(frozen=True, slots=True)
class Form:
    """How a family of models writes calls.

    Attributes:
        opens: The marker before calls; a bare form has calls without it at the beginning of the text, too.
        closes: The marker behind a call; empty if there is none.
        in_template: What chat templates of the family contain.
        has_names: Whether a call may be its name, ``[ARGS]``, and its arguments.
    """

    opens: str
    closes: str
    in_template: str
    is_bare: bool = False
    has_names: bool = False


FORMS = {
    "hermes": Form("<tool_call>", "</tool_call>", "<tool_call>"),
    "mistral": Form("[TOOL_CALLS]", "", "[TOOL_CALLS]", has_names=True),
    "llama3_json": Form("<|python_tag|>", "", '"parameters"', is_bare=True),
}
"""By vLLM's names of parsers. Hermes' form is also Qwen's."""

BARE_LIST = Form("<|python_tag|>", "", "", is_bare=True)
"""A list of calls and nothing else, which a structure forces."""


def form_of(name: str, template: str) -> Form:
    """The form of a name; for ``auto``, of the chat template. Raises UserError if that shows none."""
    if name != "auto":
        return FORMS[name]
    for form in FORMS.values():
        if form.in_template in template:
            return form
    raise UserError("tools: the model's chat template shows no known form of calls: give --tool-call-parser")


class _Place(Enum):
    TEXT = auto()
    BETWEEN = auto()
    CALL = auto()


_SEPARATORS = " \t\r\n,;[]"
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\]|(?=\{))")


class CallParser:
    """Reads the calls in one answer. An object without a marker is one only if it has one of ``names``; None: any."""

    def __init__(self, form: Form, names: Collection[str] | None = None) -> None:
        self._form, self._names = form, names
        self._place = _Place.TEXT
        self._rest = ""
        self._call = _Call()
        self._is_start = True
        self._is_blank = True  # since the last call there was no text but whitespace, which is held back
        self._passed: str | None = None  # markers and separators that are text unless a call follows; None: one came

    def feed(self, text: str) -> list[Piece]:
        """Return what is certain after more text."""
        self._rest += text
        found: list[Piece] = []
        while (pieces := self._step()) is not None:
            found += pieces
        return found

    def end(self) -> list[Piece]:
        """Return what is left when the text has ended: text that looked like a marker or a call."""
        if self._place is _Place.TEXT:
            return _texts(self._rest)
        if self._place is _Place.BETWEEN:
            return [] if self._passed is None else _texts(self._passed + self._rest)
        return [] if self._call.has_name else _texts((self._passed or "") + self._call.raw + self._rest)

    def _step(self) -> list[Piece] | None:
        """Read on; None if it takes more text."""
        match self._place:
            case _Place.TEXT:
                return self._read_text()
            case _Place.BETWEEN:
                return self._read_between()
            case _Place.CALL:
                return self._read_call()

    def _read_text(self) -> list[Piece] | None:
        form = self._form
        if self._is_start and form.is_bare:
            begin = self._rest.lstrip()
            if not begin:
                return None
            self._is_start = False
            if begin[0] in "{[":
                self._place, self._passed = _Place.BETWEEN, ""
                return []
        before, marker, after = self._rest.partition(form.opens)
        if marker:
            self._rest, self._place, self._names = after, _Place.BETWEEN, None
            text = "" if self._is_blank and before.isspace() else before
            self._passed, self._is_blank = before[len(text) :] + marker, True
            return _texts(text)
        end = len(self._rest) - _begun_marker(self._rest, form.opens)
        text = self._rest[:end]
        if not text or (self._is_blank and text.isspace()):
            return None
        self._rest, self._is_blank = self._rest[end:], False
        return [Text(text)]

    def _read_between(self) -> list[Piece] | None:
        form = self._form
        for marker, place in ((form.opens, _Place.BETWEEN), (form.closes, _Place.TEXT)):
            begin = self._rest.lstrip(" \t\r\n,;")
            if marker and begin.startswith(marker):
                self._pass(begin[len(marker) :])
                if place is _Place.TEXT:
                    return self._leave()
                self._passed = marker if self._passed is None else self._passed
                return []
            if begin and marker.startswith(begin):
                return None
        self._pass(self._rest.lstrip(_SEPARATORS))
        if not self._rest:
            return None
        if self._rest[0] == "{":
            self._call, self._place = _Call(names=self._names), _Place.CALL
            return []
        return self._read_name() if form.has_names else self._leave()

    def _pass(self, rest: str) -> None:
        """Go on to ``rest``, the end of what is to be read."""
        if self._passed is not None:
            self._passed += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest

    def _read_name(self) -> list[Piece] | None:
        found = _NAME.match(self._rest)
        if found is None:
            is_begun = re.fullmatch(r"[\w.-]+\s*(\[[ARGS]*)?", self._rest) is not None
            return None if is_begun else self._leave()
        self._rest, self._call, self._place = self._rest[found.end() :], _Call(has_name=True), _Place.CALL
        self._passed = None
        return [Begin(found[1])]

    def _leave(self) -> list[Piece]:
        self._place, self._is_blank = _Place.TEXT, not self._passed
        return _texts(self._passed or "")

    def _read_call(self) -> list[Piece] | None:
        if not self._rest:
            return None
        self._rest, pieces = self._call.feed(self._rest)
        if self._call.has_name:
            self._passed = None
        if not self._call.is_done:
            return pieces
        self._place = _Place.BETWEEN
        if self._call.has_name:
            return pieces
        text = (self._passed or "") + self._call.raw
        self._passed = None if self._passed is None else ""
        return [Text(text)]


class ForcedCall:
    """The parser of an answer that a structure makes the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begin: list[Piece] = [Begin(name)]

    def feed(self, text: str) -> list[Piece]:
        """Return the name at first, and the text as arguments."""
        begin, self._begin = self._begin, []
        return [*begin, Arguments(text)] if text else begin

    def end(self) -> list[Piece]:
        """Return nothing: all text was passed on."""
        return []


Parser = CallParser | ForcedCall


class _Call:
    """Reads one JSON object: ``{"name": NAME, "arguments": {...}}``, or (``has_name``) the arguments alone."""

    def __init__(self, *, has_name: bool = False, names: Collection[str] | None = None) -> None:
        self.raw = ""  # the text so far
        self.has_name, self.is_done = has_name, False
        self._names = names
        self._is_arguments = has_name  # the whole object is the arguments
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._begin = 0  # of the string or value that is read
        self._key, self._is_key = "", True
        self._sent = 0 if has_name else -1  # end of the arguments that were passed on; -1: they have not begun
        self._has_sent = False
        self._held: tuple[int, int] | None = None  # arguments that came before the name

    def feed(self, text: str) -> tuple[str, list[Piece]]:
        """Return what is behind the object, and the pieces of it."""
        pieces: list[Piece] = []
        for used, letter in enumerate(text):
            self.raw += letter
            pieces += self._take(letter, len(self.raw))
            if self.is_done:
                return text[used + 1 :], pieces
        return "", pieces + self._pass_on(len(self.raw))

    def _take(self, letter: str, end: int) -> list[Piece]:
        if self._in_string:
            return self._take_in_string(letter, end)
        if letter == '"':
            self._in_string, self._begin = True, end - 1
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0
            if self.is_done:
                return self._end_value(end if self._is_arguments else end - 1, is_last=True)
        elif self._depth == 1 and letter == ":" and not self._is_arguments:
            self._is_key = False
            if self._key in ("arguments", "parameters"):
                self._sent = end
        elif self._depth == 1 and letter == ",":
            return self._end_value(end - 1) if not self._is_arguments else []
        return []

    def _take_in_string(self, letter: str, end: int) -> list[Piece]:
        if self._is_escaped or letter == "\\":
            self._is_escaped = not self._is_escaped
            return []
        if letter != '"':
            return []
        self._in_string = False
        if self._depth == 1 and not self._is_arguments:
            return self._take_string(_string(self.raw[self._begin : end]))
        return []

    def _take_string(self, value: str) -> list[Piece]:
        """A string of the outermost object has ended: a key, or a value."""
        if self._is_key:
            self._key = value
        elif self._key == "name" and value and not self.has_name and (self._names is None or value in self._names):
            self.has_name = True
            return [Begin(value), *self._pass_held()]
        return []

    def _end_value(self, end: int, *, is_last: bool = False) -> list[Piece]:
        pieces = self._pass_on(end)
        if self._sent >= 0 and not self.has_name and self._held is None:
            self._held = (self._sent, end)
        self._is_key, self._key = True, ""
        if self._sent >= 0:
            self._sent = -1
        if is_last and self.has_name and not self._has_sent:
            pieces.append(Arguments("{}"))
        return pieces

    def _pass_on(self, end: int) -> list[Piece]:
        """Pass on the arguments up to ``end``, if the name is known."""
        if self._sent < 0 or not self.has_name:
            return []
        text, self._sent = self.raw[self._sent : end], end
        if not self._has_sent:
            text = text.lstrip()
        self._has_sent = self._has_sent or bool(text)
        return [Arguments(text)] if text else []

    def _pass_held(self) -> list[Piece]:
        if self._held is None:
            return []
        begin, end = self._held
        self._has_sent = True
        return [Arguments(self.raw[begin:end].strip())]


def _texts(text: str) -> list[Piece]:
    return [Text(text)] if text else []


def _string(raw: str) -> str:
    try:
        return str(json.loads(raw, strict=False))
    except ValueError:
        return ""


def _begun_marker(text: str, marker: str) -> int:
    """Return how many of the last characters of a text may be the beginning of a marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
