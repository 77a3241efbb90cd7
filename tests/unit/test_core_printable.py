from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.printable import printable, printable_lines

ANY_TEXT = st.text(st.characters(codec=None))


@given(ANY_TEXT)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(letter) for letter in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(letter) for letter in shown} & {"LRE", "RLE", "LRO", "RLO", "PDF", "RLI"}
    shown.encode()
    kept = [letter for letter in text if unicodedata.category(letter)[0] not in "CZ"]
    assert [letter for letter in kept if letter not in shown] == []


@given(st.text(st.characters(codec="utf-8")))
def test_json_keeps_its_value(text: str) -> None:
    assert json.loads(printable_lines(json.dumps({"a": [text]}, ensure_ascii=False, indent=1))) == {"a": [text]}


def test_escapes_are_shown_and_words_stay() -> None:
    assert (
        printable("\x1b[2J\x9b1m\x7f\r\n\u202egpu \u6cb3")
        == r"\u001b[2J\u009b1m\u007f\u000d\u000a\u202egpu " + "\u6cb3"
    )
    assert printable_lines("a\nb\x07") == "a\nb\\u0007"
