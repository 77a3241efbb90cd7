"""Result files: replaced atomically; pipes and mounted files are written in place."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError, WriteFailed
from floodplain.files import results
from floodplain.files.results import check_writable, write_result

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
