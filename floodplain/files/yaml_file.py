"""Reads YAML 1.2 files that users name; ambiguous content is refused.

libyaml finds the structure. Plain scalars are what the core schema of YAML 1.2 says (section 10.3.2 of its
specification), where ``no`` is a text and ``1:30`` is no number. Refused, each with its line: a key that stands twice
or is no text, ``010`` (eight or ten), infinities and NaN, tags, anchors and aliases (a few lines of them can stand for
billions of values), merge keys (``<<``), a second document, and YAML 1.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing
from floodplain.files.reading import read_text

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TWO_BASES = re.compile(r"[-+]?0[0-9]+")
_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_yaml_mapping(
    path: Path,
    max_bytes: int,
    max_depth: int,
    kind: str = "",
    *,
    same: Callable[[str], str] = str,
    number: Callable[[str, int | float], Any] = lambda _, number: number,
) -> dict[str, Any]:
    """The mapping in a YAML file; empty if the file is.

    ``same`` returns the normal form of a key: equal forms are duplicates. ``number`` makes the value of a number from
    its text and its parsed value. Raises UserError, with ``kind``, file and line, if it cannot be read, is larger than
    ``max_bytes``, nested deeper than ``max_depth``, not a mapping, or has refused content.
    """
    content = parse_yaml(read_text(path, max_bytes, kind), f"{kind} {path}".strip(), max_depth, same, number)
    if not isinstance(content, dict | None):
        raise UserError(f"{path} must hold lines KEY: VALUE")
    return content or {}


def parse_yaml(
    text: str,
    source: str,
    max_depth: int,
    same: Callable[[str], str] = str,
    number: Callable[[str, int | float], Any] = lambda _, number: number,
) -> Any:
    """The value of a YAML text; None if it is empty. Arguments and errors as of ``read_yaml_mapping``."""
    import yaml

    with parsing(source):
        events = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        try:
            return _Document(events, source, max_depth, same, number).read()
        except yaml.MarkedYAMLError as error:
            where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise UserError(f"{source}{where}: {error.problem or error.context}") from error


class _Document:
    def __init__(
        self,
        events: Iterator[Any],
        source: str,
        max_depth: int,
        same: Callable[[str], str],
        number: Callable[[str, int | float], Any],
    ) -> None:
        self._events, self._source, self._max_depth = events, source, max_depth
        self._same, self._number = same, number

    def read(self) -> Any:
        import yaml

        next(self._events)  # the stream's start
        first = next(self._events)
        if isinstance(first, yaml.StreamEndEvent):
            return None
        if first.version == (1, 1):
            self._refuse(first, "YAML 1.1 is not read, for its yes and no are no texts: this is read as YAML 1.2")
        content = self._value(next(self._events), 0)
        next(self._events)  # the document's end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            self._refuse(after, "a second document begins, and a file holds one")
        return content

    def _value(self, event: Any, depth: int) -> Any:
        import yaml

        if event.anchor is not None:  # of an anchor, or of an alias
            self._refuse(event, f"aliases are not supported: write the value of *{event.anchor:.60} out")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"tags are not supported: leave {tag:.60} out")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if depth == self._max_depth:
            self._refuse(event, f"values are nested deeper than {self._max_depth} levels")
        return self._mapping(depth + 1) if isinstance(event, yaml.MappingStartEvent) else self._list(depth + 1)

    def _list(self, depth: int) -> list[Any]:
        import yaml

        found = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            found.append(self._value(event, depth))
        return found

    def _mapping(self, depth: int) -> dict[str, Any]:
        import yaml

        found: dict[str, Any] = {}
        lines: dict[str, tuple[str, int]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth)
            if not isinstance(key, str):
                self._refuse(event, f"a key must be a text: put quotes around {key!r:.60}")
            if key == "<<" and not event.style:
                self._refuse(event, "merge keys (<<) are not supported: write the keys out")
            line = event.start_mark.line + 1
            other, other_line = lines.setdefault(self._same(key), (key, line))
            if key in found or other != key:
                name = f"{key!r:.60}" if other == key else f"{key!r:.60}, that is {other!r:.60},"
                self._refuse(event, f"{name} stands in line {other_line} already: leave one of them out")
            found[key] = self._value(next(self._events), depth)
        return found

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.style:  # in quotes, or a block
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _DECIMAL.fullmatch(text):
            return self._number(text, int(text))
        if _TWO_BASES.fullmatch(text):
            self._refuse(event, f"{text:.60} is octal to some readers: leave out the 0 before it, or put it in quotes")
        if _OTHER_BASE.fullmatch(text):
            return self._number(text, int(text, 0))
        if _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and math.isinf(float(text))):
            self._refuse(event, f"{text:.60} is no number that can be used here")
        return self._number(text, float(text)) if _FLOAT.fullmatch(text) else text

    def _refuse(self, event: Any, problem: str) -> NoReturn:
        raise UserError(f"{self._source}, line {event.start_mark.line + 1}: {problem}")
