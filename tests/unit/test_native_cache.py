"""Only whole libraries that this user wrote are loaded; a compiler that hangs is stopped."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from floodplain.files.reading import user_folder
from floodplain.memory.native import build
from floodplain.memory.native.build import CompilerFailed, LibraryCache

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return VALUE; }\n'
CHEAP = ("-O0", "-fvisibility=hidden", "-shared", "-fPIC")
LIBRARY = b"\x7fELF and more"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", CHEAP)
    yield tmp_path / "cache" / "floodplain"
    build.load_library.cache_clear()
    build._compiler_version.cache_clear()


def answer(folder: Path, value: int = 7, name: str = "s") -> int | None:
    """The compiled function's result; None if it is not loaded."""
    source = folder.parent.parent / f"{name}.cpp"
    source.write_text(SOURCE.replace("VALUE", str(value)))
    build.load_library.cache_clear()
    library = build.load_library(source, "nothing")
    return None if library is None else int(library["answer"]())


def test_what_is_stored_is_loaded_and_only_its_owner_can_write(folder: Path) -> None:
    old = os.umask(0)
    try:
        with closing(LibraryCache(folder)) as libraries:
            assert libraries.load("a.so") is None
            libraries.store("a.so", b"before")
            libraries.store("a.so", LIBRARY)
            assert libraries.load("a.so") == LIBRARY
    finally:
        os.umask(old)
    assert [path.name for path in folder.iterdir()] == ["a.so"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "a.so")} == {0o700, 0o600}


def test_a_library_that_is_not_whole_or_not_ours_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LibraryCache(folder)) as libraries:
        libraries.store("a.so", LIBRARY)
        path, content = folder / "a.so", (folder / "a.so").read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert libraries.load("a.so") is None
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert libraries.load("a.so") is None
        path.write_bytes(content)
        assert libraries.load("a.so") == LIBRARY
        path.chmod(0o620)
        assert libraries.load("a.so") is None
        path.chmod(0o600)
        path.rename(folder / "b.so")
        path.symlink_to("b.so")
        assert libraries.load("a.so") is None
        path.unlink()
        os.mkfifo(path)
        assert libraries.load("a.so") is None
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert libraries.load("b.so") is None


def test_a_folder_that_others_may_change_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    for mode in (0o770, 0o702, 0o1777):
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="others may write"):
            LibraryCache(folder)
    folder.chmod(0o755)
    LibraryCache(folder).close()
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(OSError, match="link"):
        LibraryCache(link)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError, match="another user"):
            LibraryCache(folder)


@pytest.mark.slow
def test_a_library_is_compiled_once_and_again_if_it_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(folder, 7) == 7
    (stored,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile_library", lambda *_: pytest.fail("compiled again"))
        assert answer(folder, 7) == 7
    stored.write_bytes(stored.read_bytes()[:-1])
    assert answer(folder, 7) == 7
    with closing(LibraryCache(folder)) as libraries:
        assert libraries.load(stored.name) is not None
    assert answer(folder, 8, "other") == 8  # another source is another library


@pytest.mark.slow
def test_without_a_usable_folder_a_library_is_compiled_and_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_candidates", lambda: [Path("/proc/nothing"), Path("/dev/null")])
    assert answer(folder) == 7
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "compiled kernels are not kept (set XDG_CACHE_HOME" in caplog.text


@pytest.mark.parametrize("command", ["exec sleep 1000", "sleep 1000", "kill -9 $$", "exit 3", "exec /no/such/program"])
def test_a_compiler_that_hangs_or_fails_is_one_line(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = folder.parent.parent / "c++"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{command}\n')
    fake.chmod(0o700)
    monkeypatch.setattr(build, "_find_compiler", lambda: str(fake))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.05)
    assert answer(folder) is None
    assert len(caplog.records) == 1
    assert "s.cpp cannot be compiled, nothing does its work, slower: " in caplog.text


def test_what_a_compiler_started_ends_with_it(tmp_path: Path) -> None:
    """Otherwise the reader would wait for the pipe that the child holds."""
    with pytest.raises(CompilerFailed, match=r"was stopped after 0.05 s"):
        build._run(("sh", "-c", "sleep 1000 & wait"), 0.05, os.environ)


def test_a_user_without_a_home_has_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/c")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/h")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/h/.cache")
    monkeypatch.setenv("HOME", "relative")
    assert user_folder("XDG_CACHE_HOME", ".cache") is None
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert user_folder("XDG_CACHE_HOME", ".cache") is None
