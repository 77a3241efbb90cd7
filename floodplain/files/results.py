"""Result files: checked before the work, written completely or not at all; failures are one-line errors."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from floodplain.core.errors import UserError, WriteFailed

_PART = ".floodplain-{}.part"
"""Name of a partial file, which is renamed to the result once it is complete."""
_held_pipes: list[int] = []

PICTURES = (".png", ".svg", ".pdf")
PLOT_HELP = f"draw it into this file ({', '.join(PICTURES)})"


def check_picture(path: Path | None) -> None:
    """Raise UserError if the file of ``--plot`` has another ending than those of ``PICTURES``."""
    if path is not None and path.suffix not in PICTURES:
        raise UserError(f"--plot {path} must end in one of {', '.join(PICTURES)}")


def check_writable(path: Path, flag: str = "--out", *others: Path | None) -> None:
    """Make a result's folder, and check that the file can be written. Raises UserError, with ``flag``, if not.

    It is none of ``others``, which are read or written, too: a file would lose what it holds.
    """
    try:
        is_kept = path.is_file() or not path.exists()  # a device keeps nothing
        if is_kept and os.path.realpath(path) in [os.path.realpath(other) for other in others if other is not None]:
            raise UserError(f"{flag} {path} is read, or written to, as another file: give another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        old, target = _look_up(path)
        if old is not None:
            _try_to_open(path, old)
        if target is not None:
            fd, part = _open_part(target.parent)
            part.unlink()
            os.close(fd)
    except FileExistsError:
        raise UserError(f"{flag} {path} cannot be written: {path.parent} is no folder") from None
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        raise UserError(f"{flag} {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_result(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` atomically: until all of it is on disk, the old file stays.

    It is written beside and renamed. Links are followed, the mode of an old file is kept, a missing folder is made.
    What cannot be replaced is written in place: a pipe, a device, ``/dev/stdout``, a file that is mounted by itself.
    Text is written in UTF-8; a lone surrogate (a byte of a file's name that is no UTF-8) as ``\\udcXX``. Raises
    WriteFailed, and leaves no partial file.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        old, target = _look_up(path)
        try:
            if target is not None:
                _replace(target, data, old)
                return
        except OSError as error:
            if error.errno != errno.EBUSY:  # this file alone is mounted into a container
                raise
        _write_in_place(path, data)


@contextmanager
def writing(name: object) -> Iterator[None]:
    """Turn system errors in this context into ``WriteFailed`` for ``name``."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"{name} cannot be written: {error.strerror or error}") from error


def open_standard_streams() -> None:
    """Open closed standard streams on ``/dev/null``, else the next opened file would get their number.

    Letters that the locale's encoding lacks are escaped on standard output, as they are on standard error.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _look_up(path: Path) -> tuple[os.stat_result | None, Path | None]:
    """(status of the existing file, the file to replace or make; None if it cannot be replaced)."""
    try:
        old = path.stat()  # raises for circular links
    except FileNotFoundError:
        old = None
    target = _end_of_links(path)
    is_file = old is None or stat.S_ISREG(old.st_mode)
    return old, target if is_file and not target.is_relative_to("/proc") else None


def _end_of_links(path: Path) -> Path:
    """The target of links, up to one in ``/proc``: that is an open file (as ``/dev/stdout``), not a name."""
    path = Path(os.path.realpath(path.parent), path.name)
    while path.is_symlink() and not path.is_relative_to("/proc"):
        link = path.parent / path.readlink()
        path = Path(os.path.realpath(link.parent), link.name)
    return path


def _try_to_open(path: Path, old: os.stat_result) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(old.st_mode):
        _held_pipes.append(fd)  # closing it would be end of file for the reader
    else:
        os.close(fd)


def _open_part(folder: Path) -> tuple[int, Path]:
    """A new file in ``folder``, locked while it is open, so that no other writer removes it as dead."""
    _remove_dead_parts(folder)
    while True:
        part = folder / _PART.format(os.urandom(8).hex())
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:  # else another writer removed it before it was locked
            return fd, part
        os.close(fd)


def _remove_dead_parts(folder: Path) -> None:
    for part in folder.glob(_PART.format("*")):
        with suppress(OSError):
            fd = os.open(part, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(fd)


def _replace(target: Path, data: bytes, old: os.stat_result | None) -> None:
    fd, part = _open_part(target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            if old is not None:
                with suppress(PermissionError):
                    os.fchown(fd, old.st_uid, old.st_gid)
                os.fchmod(fd, stat.S_IMODE(old.st_mode))
            file.write(data)
            file.flush()
            os.fsync(fd)
            part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _write_in_place(path: Path, data: bytes) -> None:
    end = _end_of_links(path)
    if end.parent == Path(f"/proc/{os.getpid()}/fd"):
        fd = os.dup(int(end.name))  # reopening would start at the file's beginning
    else:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(fd, True)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
