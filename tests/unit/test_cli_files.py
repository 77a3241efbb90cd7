from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from floodplain.cli.bench import BenchConfig, _save, run
from floodplain.core.errors import UserError, WriteFailed
from floodplain.files.results import check_writable, writing
from floodplain.observe.terminal import announce, say


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_writable(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--out {path} cannot be written: ")
    return str(caught.value)


def test_a_result_file_is_checked_and_left_as_it_was(tmp_path: Path) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("kept")
    link.symlink_to(tmp_path / "target")
    for path in (old, tmp_path / "new" / "deep" / "out.json", link, Path("/dev/null")):
        check_writable(path)
    assert old.read_text() == "kept"
    assert link.is_symlink() and not link.exists()
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_a_result_file_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "no" / "folder")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert "Is a directory" in refusal(tmp_path)
    assert "symbolic links" in refusal(tmp_path / "loop")
    assert "No such file" in refusal(tmp_path / "dangling")
    assert refusal(tmp_path / "file" / "x.json").endswith(f"{tmp_path / 'file'} is no folder")
    assert "No such device" in refusal(tmp_path / "pipe")
    assert "too long" in refusal(tmp_path / ("x" * 300))
    assert "null byte" in refusal(tmp_path / "a\0b")


def test_the_flag_that_named_a_file_is_in_the_refusal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--plot .* cannot be written: Is a directory$"):
        check_writable(tmp_path, "--plot")


def test_pictures_that_cannot_be_drawn_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "o-plots").touch()
    values = {item.name: item.default for item in fields(BenchConfig)} | {"out": tmp_path / "o.json", "plot": True}
    with pytest.raises(UserError, match=r"^--plot .*o-plots/"):
        run(argparse.Namespace(**values))


def test_a_result_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match=r"^/dev/full cannot be written: No space left on device$"):
        _save(BenchConfig(out=Path("/dev/full")), Path("/dev/full"), {"a": 1}, quiet=True)
    with pytest.raises(ZeroDivisionError), writing("x"):
        raise ZeroDivisionError


SAY = """import sys
from floodplain.files.results import open_standard_streams
from floodplain.observe import terminal
open_standard_streams()
"""


@pytest.mark.parametrize("redirection", [">/dev/full", "| exec sleep 0"])
def test_output_that_is_not_read_is_one_line_and_no_traceback(redirection: str) -> None:
    program = (
        SAY + "from floodplain.core.errors import WriteFailed\n"
        "try:\n    for _ in range(10**5): terminal.say('x' * 100)\n"
        "except WriteFailed as error: print(error, file=sys.stderr); sys.exit(1)"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("standard output cannot be written: ")
    assert done.stderr.count("\n") == 1


def test_letters_that_the_locale_lacks_are_escaped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY + "terminal.say('mod\u00e8le')"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == b"mod\\u00e8le\n"


def test_closed_streams_are_not_given_to_other_files() -> None:
    """Otherwise the next opened file is descriptor 1, and receives the output of child processes."""
    program = SAY + "print('x', file=sys.stderr, flush=True); sys.exit(os.open('/dev/zero', os.O_RDONLY))"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "import os; $1" <&- >&- 2>&-', sys.executable, program],
        capture_output=True,
        check=False,
    )
    assert done.returncode > 2


def test_a_service_whose_output_is_full_logs_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        announce("m is served at u")
    assert caplog.messages == ["standard output cannot be written: No space left on device: m is served at u"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_result_is_printed_in_any_encoding_and_json_stays_json(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    say('{"name": "\u00fc \U0001f30a"}')
    assert json.loads(written.getvalue().decode(encoding)) == {"name": "\u00fc \U0001f30a"}


def test_only_our_own_codes_reach_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    say("gpu\x1b[31m\nbob\u202e", "\x1b[H")
    assert capsys.readouterr().out == "\x1b[Hgpu\\u001b[31m\nbob\\u202e\n"


def test_without_a_standard_output_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    say("x")
