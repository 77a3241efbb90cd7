"""Makes untrusted text (files, servers, clients, names) safe to show on a terminal or in a log."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters: C0, DEL, C1
    "\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"  # invisible, or they turn the direction of writing
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # half characters, which no encoding can write
    "]"
)


def printable(text: str) -> str:
    """``text`` on one line: what would move the cursor, colour, hide or reverse text is shown as ``\\u001b``.

    JSON stays JSON of the same value if it is on one line.
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines: line feeds stay."""
    return "\n".join(map(printable, text.split("\n")))
