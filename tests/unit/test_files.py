"""Files that users name are read within bounds; a parser's error becomes one line."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from floodplain.core.errors import InvariantError, UserError
from floodplain.files.parsing import listed, parse_json, parsing, quiet_panics, read_json_object
from floodplain.files.reading import read_file, read_text


def refusal(path: Path, max_bytes: int = 100) -> str:
    with pytest.raises(UserError) as caught:
        read_text(path, max_bytes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot read {path}")
    return message


def test_a_file_is_read_up_to_its_bound_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("\ufeffäb", encoding="utf-8")
    assert read_text(path, 6) == "äb"
    assert "larger than 5B" in refusal(path, 5)
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: reading all of it would not end
    assert "larger than 1KiB" in refusal(path, 1024)
    path.write_bytes(b"x")
    path.chmod(0o640)
    assert read_file(path, 1).mode == 0o640


def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    pipe, loop, dangling = tmp_path / "pipe", tmp_path / "loop", tmp_path / "dangling"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "nothing")
    assert "it is a pipe" in refusal(pipe)
    assert "it is a folder" in refusal(tmp_path)
    assert "it is a device" in refusal(Path("/dev/zero"))
    assert "symbolic links" in refusal(loop)
    assert "No such file" in refusal(dangling)
    assert "File name too long" in refusal(tmp_path / ("x" * 300))
    assert "null byte" in refusal(tmp_path / "a\0b")


def test_bytes_that_are_not_utf_8_are_named_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"ab\xff")
    assert "not UTF-8 text (byte 2)" in refusal(path)


def test_reasons_replace_pythons_messages_about_its_own_limits() -> None:
    for text, reason in (("[" * 100_000, "it is nested too deeply"), ("9" * 5000, "a number has too many digits")):
        with pytest.raises(UserError, match=rf"\({reason}\)$"):
            parse_json(text, "f")


class PanicException(BaseException):
    """A panic of a Rust parser."""


@pytest.mark.parametrize(
    "error", [RecursionError("deep\n\nstack"), MemoryError(), KeyError("a"), OSError(5, "broken"), PanicException("p")]
)
def test_whatever_a_parser_raises_becomes_one_line_with_the_file(error: BaseException) -> None:
    with pytest.raises(UserError) as caught, parsing("f.bin"):
        raise error
    message = str(caught.value)
    assert message.startswith("f.bin: cannot be read (")
    assert "\n" not in message
    assert caught.value.__cause__ is error


def test_what_rust_prints_of_a_panic_is_dropped_and_nothing_else_is(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(error: BaseException | None) -> None:
        with quiet_panics():
            os.write(2, b"words of the parser\n")
            if error:
                raise error

    for error in (None, ValueError("v")):
        with suppress(ValueError):
            speak(error)
        assert capfd.readouterr().err == "words of the parser\n"
    with pytest.raises(PanicException):
        speak(PanicException("p"))
    os.write(2, b"and afterwards\n")
    assert capfd.readouterr().err == "and afterwards\n"


@pytest.mark.parametrize(
    "error", [InvariantError("bug"), NameError("bug"), KeyboardInterrupt(), SystemExit(3), UserError("says more")]
)
def test_bugs_and_interruptions_are_not_taken_for_bad_files(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, parsing("f"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "1e999", "NaN", "[-Infinity]", "{", "", '{"a":1}}'])
def test_json_that_no_program_means_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"^f line 3") as caught:
        parse_json(text, "f line 3")
    assert len(str(caught.value)) < 300


def test_names_in_a_message_are_neither_many_nor_long() -> None:
    assert listed(["a", 1]) == "a, 1"
    assert listed([]) == "(none)"
    assert listed(["x" * 1000]) == "x" * 40 + "…"
    assert listed("b" for _ in range(10**6)) == "b, " * 16 + "…"


def test_json_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"a": [1, 2.5, null]}')
    assert read_json_object(path) == {"a": [1, 2.5, None]}
    path.write_text("[1]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        read_json_object(path)


def test_a_key_that_stands_twice_in_json_of_ours_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"b": 1, "a": {"x": 1, "y": 2, "x": 3}}')
    with pytest.raises(UserError, match=r"f\.json: cannot be read \(the key 'x' stands twice in an object: leave one"):
        read_json_object(path)
    assert read_json_object(path, keys_once=False)["a"]["x"] == 3
