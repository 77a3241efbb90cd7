"""Files by which engines of one machine find each other's devices: their paths, creation, locks and removal.

Locks on the first bytes show who uses a file; the kernel drops them when their holder exits. Each process that has the
file open shares one lock; the engine that computes on the device, its home, holds another one alone. The last process
to close the file removes it; if that one was killed, the next engine of the machine does (``sweep``). A file is removed
with all of it locked, so that no process uses it; one that just opened it retries.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.memory.host import libc
from floodplain.memory.host.libc import TO_THE_END

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of a device, and of the member of a coordinator that computes on it."""

_PREFIX = "floodplain-"
_MAGIC = b"flood"  # headers of all kinds begin with it
_HOME, _PRESENT = 0, 1  # bytes that the home locks, that each process with the file open locks


def find_path(name: str, directory: Path | None) -> Path:
    """Path of the device ``name``; ``directory`` None is /dev/shm, or the temporary folder without one."""
    if not NAME.fullmatch(name):
        raise UserError(f"device name {name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    return (directory or _default_directory()) / f"{_PREFIX}{name}"


def open_or_create(path: Path, header: bytes, num_bytes: int) -> int:
    """Open the file at ``path``, or create it with ``num_bytes`` that begin with ``header``; returns its descriptor.

    ``leave`` closes it. Raises ``UserError`` if it cannot be opened, or has another user or another mode than 0600.
    """
    while True:
        try:
            fd = _try_create(path, header, num_bytes)
            if fd is None:
                fd = _try_enter(path)
            if fd is not None:
                return fd
        except FileNotFoundError:  # removed between the two calls, or no folder at all
            if not path.parent.is_dir():
                raise UserError(f"device folder {path.parent} does not exist: create it") from None
        except OSError as error:
            raise UserError(f"cannot open device {path}: {error.strerror}") from None


def open_existing(path: Path) -> int:
    """Open the file at ``path``; returns its descriptor, for ``leave``. ``UserError`` without this user's own file."""
    try:
        fd = _try_enter(path)
    except FileNotFoundError:
        fd = None
    except OSError as error:
        raise UserError(f"cannot open device {path}: {error.strerror}") from None
    if fd is None:
        raise UserError(f"there is no device {path}: start the process that lends it, on this machine")
    return fd


def claim(fd: int, path: Path) -> None:
    """Become the device's home, until ``leave`` or the end of this process; ``UserError`` if another engine is."""
    if not libc.try_lock(fd, _HOME, 1):
        raise _taken(path)


def expect_no_home(fd: int, path: Path) -> None:
    """Raise the UserError of ``claim`` if another engine is the device's home."""
    if has_home(fd):
        raise _taken(path)


def has_home(fd: int) -> bool:
    """Whether another engine is the device's home."""
    return libc.find_lock(fd, _HOME, 1) is not None


def leave(fd: int, path: Path) -> None:
    """Close the file with all its locks; the last process to close it removes it."""
    libc.unlock(fd, 0, TO_THE_END)  # before the check, so that one of two that leave at once is the last
    remove_if_alone(fd, path)
    os.close(fd)


def remove_if_alone(fd: int, path: Path) -> bool:
    """Remove the file, and lock others out until ``fd`` is closed; False if another process has it open."""
    if not libc.try_lock(fd, 0, TO_THE_END):
        return False
    if is_named(fd, path):
        path.unlink(missing_ok=True)
    return True


def sweep(directory: Path | None = None) -> dict[str, int]:
    """Remove what killed processes of this user left; returns the devices' names with their bytes in memory."""
    removed: dict[str, int] = {}
    for path in (directory or _default_directory()).glob(f"{_PREFIX}*"):
        try:
            fd = _open_own(path)
        except (OSError, UserError):  # another user's, or removed meanwhile
            continue
        is_ours = os.pread(fd, len(_MAGIC), 0) == _MAGIC
        num_bytes = 512 * os.fstat(fd).st_blocks
        if is_ours and remove_if_alone(fd, path):
            removed[path.name.removeprefix(_PREFIX)] = num_bytes
        os.close(fd)
    return removed


def is_named(fd: int, path: Path) -> bool:
    """Whether ``path`` still leads to this file: it may have been removed, and another one made."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _taken(path: Path) -> UserError:
    return UserError(f"device {path} is another engine's, which runs: use another name")


def _default_directory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _open_own(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o600:
        os.close(fd)
        raise UserError(f"{path} must be this user's own file with mode 0600: remove it or use another name")
    return fd


def _try_enter(path: Path) -> int | None:
    """Open the file, and share the lock of the processes that have it open; None if it is just being removed."""
    fd = _open_own(path)
    if libc.try_share(fd, _PRESENT, 1) and is_named(fd, path):
        return fd
    os.close(fd)
    return None


def _try_create(path: Path, header: bytes, num_bytes: int) -> int | None:
    """The descriptor of a file that appears under its name complete, by a link; None if the name is taken."""
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, header, 0)
        libc.try_share(fd, _PRESENT, 1)
        # open(2) names this way to give an O_TMPFILE a name. Only with a src_dir_fd, unused for an absolute path, does
        # Python call linkat, which follows the link.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd
