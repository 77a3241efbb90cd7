"""The files by which engines of one machine find each other's devices: where they lie, how they come to be, and whose.

What is in them is the business of ``device_file`` (a host device, pages and all) and ``cuda_home`` (which GPU).
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from floodplain.core.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a device, and of the member of a coordinator that computes on it."""


def find_path(name: str, directory: Path | None) -> Path:
    """Where the device ``name`` lies; ``directory`` None is /dev/shm, or the temporary folder without one."""
    if not NAME.fullmatch(name):
        raise UserError(f"device name {name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    shared = Path("/dev/shm")
    default = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return (directory or default) / f"floodplain-{name}"


def open_or_create(path: Path, header: bytes, num_bytes: int) -> int:
    """Open the file at ``path``, creating it if there is none; returns its descriptor.

    Args:
        path: Where.
        header: What it begins with if it is created.
        num_bytes: Its size if it is created; it has no blocks behind the header yet.

    Raises:
        UserError: It cannot be opened, or the folder is missing.
    """
    while True:
        try:
            fd = _try_create(path, header, num_bytes)
            return _open(path) if fd is None else fd
        except FileNotFoundError:  # removed between the two calls, or no folder at all
            if not path.parent.is_dir():
                raise UserError(f"device folder {path.parent} does not exist: create it") from None
        except OSError as error:
            raise UserError(f"cannot open device {path}: {error.strerror}") from None


def open_existing(path: Path) -> int:
    """Open the file at ``path``, which must be there; returns its descriptor.

    Raises:
        UserError: There is none, or it cannot be opened.
    """
    try:
        return _open(path)
    except FileNotFoundError:
        raise UserError(f"there is no device {path}: start the process that lends it, on this machine") from None
    except OSError as error:
        raise UserError(f"cannot open device {path}: {error.strerror}") from None


def expect_own(fd: int, path: Path) -> os.stat_result:
    """What the system says of a file that only this user can read or write.

    Raises:
        UserError: It is another user's, has another mode, or is no file.
    """
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o600:
        raise UserError(f"{path} must be this user's own file with mode 0600: remove it or use another name")
    return info


def is_named(fd: int, path: Path) -> bool:
    """Whether ``path`` still leads to this file: it may have been removed, and another one made."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def _try_create(path: Path, header: bytes, num_bytes: int) -> int | None:
    """The descriptor of a file that appears under its name complete, by a link; None if the name is taken."""
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, header, 0)
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
