"""Files that users name are read within bounds; a parser's error becomes one line."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError, UserError, WriteFailed
from floodplain.files import results
from floodplain.files.parsing import listed, parse_json, parsing, quiet_panics, read_json_object
from floodplain.files.profile import RESULT_KEYS, Profile, read_profile, warn_if_foreign
from floodplain.files.reading import read_file, read_text
from floodplain.files.results import check_writable, write_result
from floodplain.observe.strict_json import save_result


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


# -- a profile file is read as it was written; a malformed one is refused in one line with its path --------------------


VALUES: dict[type, Any] = {float: 2.5, int: 2**31, str: "producer"}


def make_profile(kind: str = "llm", **result: Any) -> Profile:
    values = {key: VALUES[what] for key, what in RESULT_KEYS[kind].items()} | result
    return Profile(kind=kind, subject="smollm2", machine="a laptop", settings={"seed": 0}, result=values)


@pytest.mark.parametrize("kind", RESULT_KEYS)
def test_it_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.json", make_profile(kind)
    save_result(path, profile.to_json())
    assert read_profile(path) == read_profile(path, kind) == profile


@pytest.mark.parametrize(
    ("model", "machine", "is_foreign"),
    [
        ("smollm2", "a laptop", False),
        ("/models/smollm2/", "a laptop", False),
        ("org/SmolLM2", "a laptop", False),
        ("dummy:smollm2", None, False),
        ("smollm2", "a server", True),
        ("smollm3", None, True),
    ],
)
def test_a_profile_of_another_model_or_machine_is_one_warning_with_both(
    model: str, machine: str | None, is_foreign: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_foreign(Path("p.json"), make_profile("step"), model, machine)
    here = model if machine is None else f"{model} on {machine}"
    told = f"p.json was measured for smollm2 on a laptop, and is used for {here}: its numbers may be wrong here"
    assert caplog.messages == [told] * is_foreign


@pytest.mark.parametrize("measured", ["http://127.0.0.1:8000", "emulated-pcie4 on a laptop", "a, b on a laptop"])
def test_servers_and_emulated_links_are_no_other_machine(measured: str, caplog: pytest.LogCaptureFixture) -> None:
    profile = replace(make_profile(), machine=measured)
    warn_if_foreign(Path("p.json"), profile, "smollm2", "a laptop")
    assert not caplog.messages
    warn_if_foreign(Path("p.json"), profile, "smollm2", "laptop")
    assert bool(caplog.messages) is (" on " in measured)


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_producers_spare_what_is_free_and_consumers_need_what_bursts_take(free: int, needed: int) -> None:
    assert make_profile(free_bytes=free, role="producer").spare_bytes == free
    assert make_profile(free_bytes=free, role="consumer").spare_bytes == 0
    assert make_profile("swap", needs_bytes=needed).spare_bytes == -needed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "x"}, "is no profile"),
        ({"version": 2}, "version 2"),
        ({"kind": "soup"}, "kind 'soup'"),
        ({"kind": ["llm"]}, "kind"),
        ({"tries": {}}, "tries must be a list"),
        ({"machine": 3}, "machine must be a text"),
        ({"result": {}}, r"result\.rate_rps"),
        ({"result": make_profile(rate_rps="fast").result}, r"result\.rate_rps"),
        ({"result": make_profile(free_bytes=-1).result}, r"result\.free_bytes"),
        ({"result": make_profile(free_bytes=True).result}, r"result\.free_bytes"),
        ({"result": make_profile(role="both").result}, r"result\.role"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(make_profile().to_json() | change))
    with pytest.raises(UserError, match=complaint) as refused:
        read_profile(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_kind_than_wanted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_result(path, make_profile("step").to_json())
    with pytest.raises(UserError, match="llm"):
        read_profile(path, "llm")


def test_a_profile_with_a_field_left_out_is_refused(tmp_path: Path) -> None:
    path, document = tmp_path / "profile.json", make_profile().to_json()
    del document["settings"]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="floodplain profile writes it"):
        read_profile(path)


# -- result files ------------------------------------------------------------------------------------------------------


OLD, NEW = b"old" * 1000, b"new!" * 2000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Stopped(BaseException):
    """Stops the writer."""


@contextmanager
def stopped_at(call: str, monkeypatch: pytest.MonkeyPatch, outcome: BaseException) -> Iterator[list[str]]:
    """Make ``os.CALL`` raise ``outcome``; yield a log of its calls."""
    called: list[str] = []

    def stop(*_: Any, **__: Any) -> None:
        called.append(call)
        raise outcome

    with monkeypatch.context() as patch:
        patch.setattr(os, call, stop)
        yield called


@pytest.mark.parametrize("call", ["open", "fchmod", "fsync", "replace"])
@pytest.mark.parametrize("outcome", [OSError(errno.ENOSPC, "No space left on device"), Stopped()])
def test_a_writer_that_is_stopped_leaves_the_old_result_and_nothing_else(
    call: str, outcome: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    out.write_bytes(OLD)
    with (
        stopped_at(call, monkeypatch, outcome) as called,
        pytest.raises(WriteFailed if isinstance(outcome, OSError) else Stopped),
    ):
        write_result(out, NEW)
    assert called == [call]
    assert (out.read_bytes(), names(tmp_path)) == (OLD, ["out.json"])


KILLED = """
import os, signal, sys
from pathlib import Path
from floodplain.files.results import write_result
setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
write_result(Path(sys.argv[1]), b"new!" * 2000)
"""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_a_killed_writer_leaves_goes_with_the_next_result(call: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_bytes(OLD)
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), call], check=False)
    assert done.returncode == -signal.SIGKILL
    assert out.read_bytes() == OLD
    (left,) = (path for path in tmp_path.iterdir() if path != out)
    assert left.name.startswith(".floodplain-")
    write_result(out, NEW)
    assert (out.read_bytes(), names(tmp_path)) == (NEW, ["out.json"])


def test_the_partial_file_of_a_running_writer_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer starts while the first one is in ``fsync``."""
    first, fsync = tmp_path / "first", os.fsync

    def write_another(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_result(tmp_path / "second", NEW)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", write_another)
    write_result(first, OLD)
    assert (first.read_bytes(), (tmp_path / "second").read_bytes()) == (OLD, NEW)
    assert names(tmp_path) == ["first", "second"]


def test_a_full_disk_keeps_the_old_result(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_bytes(OLD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(OLD), limits[1]))
    try:
        with pytest.raises(WriteFailed, match=r"out\.json cannot be written: File too large$"):
            write_result(out, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (out.read_bytes(), names(tmp_path)) == (OLD, ["out.json"])


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_an_old_file_keeps_its_mode_and_a_new_one_gets_the_umasks(mode: int, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch()
    old.chmod(mode)
    before = os.umask(0o027)
    try:
        for path in (old, tmp_path / "new"):
            write_result(path, NEW)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, tmp_path / "new")] == [mode, 0o640]


def test_links_stay_and_what_they_lead_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    target, link, far = tmp_path / "deep" / "t", tmp_path / "deep" / "link", tmp_path / "far"
    link.symlink_to("t")
    far.symlink_to("deep/link")
    for content in (OLD, NEW):  # the first write creates the target
        write_result(far, content)
        assert target.read_bytes() == content
    assert link.is_symlink() and far.is_symlink() and not target.is_symlink()
    assert names(tmp_path / "deep") == ["link", "t"]


def test_a_pipe_gets_the_bytes_and_no_end_before_them(tmp_path: Path) -> None:
    """``check_writable`` must not cause an end of file at the reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        write_result(pipe, NEW)
        assert os.read(reader, 2 * len(NEW)) == NEW
    finally:
        for fd in (reader, *results._held_pipes):
            os.close(fd)
        results._held_pipes.clear()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_is_written_where_it_stands(tmp_path: Path) -> None:
    """Reopening it by name would truncate a file behind it; later output would overwrite the result."""
    program = (
        "import sys; from pathlib import Path; from floodplain.files.results import write_result\n"
        "print('before', flush=True); write_result(Path('/dev/stdout'), 'result\\n'); print('after')"
    )
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", program], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before\nresult\nafter\n"
    assert names(tmp_path) == ["log"]


def test_a_file_that_is_mounted_by_itself_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    out.write_bytes(OLD)
    with stopped_at("replace", monkeypatch, OSError(errno.EBUSY, "Device or resource busy")):
        write_result(out, NEW)
    assert (out.read_bytes(), names(tmp_path)) == (NEW, ["out.json"])


def test_a_name_that_is_no_utf_8_can_be_in_a_result(tmp_path: Path) -> None:
    write_result(tmp_path / "out", os.fsdecode(b"a\xff"))
    assert (tmp_path / "out").read_bytes() == b"a\\udcff"


def test_a_folder_in_which_no_file_can_be_made_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself is writable, but cannot be replaced."""
    out = tmp_path / "out.json"
    out.write_bytes(OLD)
    real: Callable[..., int] = os.open

    def refuse_new(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse_new)
    with pytest.raises(UserError, match=r"^--out .*out\.json cannot be written: Permission denied$"):
        check_writable(out)
    assert out.read_bytes() == OLD


def test_a_result_is_no_file_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "in.yaml").write_text("a: 1")
    (tmp_path / "link.yaml").symlink_to("in.yaml")
    check_writable(tmp_path / "out.json", "--out", tmp_path / "in.yaml", None)
    check_writable(Path("/dev/null"), "--out", Path("/dev/null"))
    for name, other in (("link.yaml", "in.yaml"), ("new.json", "new.json")):
        with pytest.raises(UserError, match=f"--out .*{name} is read, or written to, as another file"):
            check_writable(tmp_path / name, "--out", None, tmp_path / other)
