from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.core.printable import printable, printable_lines
from floodplain.core.sizes import MAX_SIZE_BYTES, format_size, parse_size, show_size


@given(st.integers(1, MAX_SIZE_BYTES) | st.builds(lambda n, k: n << k, st.integers(1, 1024), st.integers(0, 40)))
def test_what_is_formatted_parses_back(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


@given(st.integers(0, MAX_SIZE_BYTES))
def test_what_is_shown_is_short_and_right_to_four_digits(num_bytes: int) -> None:
    shown = show_size(num_bytes)
    assert len(shown) <= len("1.234 MiB") and "e" not in shown.split()[0]
    number, unit = shown.split()
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    assert float(number) * units[unit] == pytest.approx(num_bytes, rel=6e-4)


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(66_584_576, "63.5 MiB"), (2**33, "8 GiB"), (1023, "1023 bytes"), (0, "0 bytes")]
)
def test_sizes_are_shown_as_people_write_them(num_bytes: int, shown: str) -> None:
    assert show_size(num_bytes) == shown


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("48M", "48MiB, 48MB, or bytes"),
        ("1.5g", "1.5GiB, 1.5GB, or bytes"),
        ("48Mi", "48MiB, or bytes"),
        ("1i", "256MiB, 4GB, or bytes"),
        ("x", "256MiB, 4GB"),
    ],
)
def test_a_size_without_a_whole_unit_is_answered_by_the_accepted_forms(text: str, forms: str) -> None:
    with pytest.raises(UserError, match=f"'{text}' is no size: write {forms}"):
        parse_size(text)


@given(st.integers(1, 1000), st.sampled_from(["KB", "MB", "GB", "KiB", "MiB", "GiB", "B", ""]))
def test_units_mean_powers_of_their_base(number: int, unit: str) -> None:
    power = "BKMG".index(unit[:1] or "B")
    assert parse_size(f"{number}{unit}") == number * (1024 if "i" in unit else 1000) ** power


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("256MiB", 2**28), ("4GB", 4 * 10**9), ("1.5GiB", 3 * 2**29), ("65536", 65536), (" 2 gib ", 2**31)],
)
def test_sizes_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


NONSENSE = (
    "-1GiB", "0", "0MiB", "4G", "", "MiB", "1e9", "nan", "inf", "1.5", "0.0003KB", "99999999TiB", "1_000", "٣MiB",
    "9" * 99,
)  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UserError, match=r"no size|whole number|out of range") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_user_error(text: str) -> None:
    try:
        assert 0 < parse_size(text) <= MAX_SIZE_BYTES
    except UserError as error:
        assert "\n" not in str(error)


# -- text for a terminal -----------------------------------------------------------------------------------------------


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
