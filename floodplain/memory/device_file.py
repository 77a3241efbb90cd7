"""The file behind a host device: where it lies, how it comes to be, and what an attaching process checks."""

from __future__ import annotations

import os
import re
import stat
import struct
import tempfile
from pathlib import Path

from floodplain.core.errors import UserError

PAGE_BYTES = 64 * 1024
"""Unit of mapping on the host: fine enough for small models, and 2 MiB are 32 of them, not 512."""

_HEADER = struct.Struct("<8sIQ")  # magic, page bytes, capacity; alone in the first page of the file
_MAGIC = b"floodpl1"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a device, and of the member of a coordinator that computes on it."""


def find_path(name: str, directory: Path | None) -> Path:
    """Where the device ``name`` lies; ``directory`` None is /dev/shm, or the temporary folder without one."""
    if not NAME.fullmatch(name):
        raise UserError(f"device name {name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    shared = Path("/dev/shm")
    default = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return (directory or default) / f"floodplain-{name}"


def count_pages(capacity_bytes: int) -> int:
    """Whole pages in ``capacity_bytes``; at least one, or a UserError."""
    if capacity_bytes < PAGE_BYTES:
        raise UserError(f"a device needs at least {PAGE_BYTES} bytes, not {capacity_bytes}")
    return capacity_bytes // PAGE_BYTES


def create_anonymous(num_pages: int) -> int:
    """Create a file without a name; returns its descriptor."""
    fd = os.memfd_create("floodplain", os.MFD_CLOEXEC)
    os.ftruncate(fd, (1 + num_pages) * PAGE_BYTES)
    return fd


def attach_or_create(path: Path, num_pages: int, *, expects_size: bool = True) -> int:
    """Open the device file at ``path``, creating it if there is none; returns its descriptor.

    Args:
        path: Where.
        num_pages: Its size if it is created, and, if ``expects_size``, what it must be otherwise.
        expects_size: See above.

    Raises:
        UserError: What is there is another user's, of another size or no device, or the folder is missing.
    """
    while True:
        try:
            fd = _try_create(path, num_pages)
            return _attach(path, num_pages if expects_size else None) if fd is None else fd
        except FileNotFoundError:  # removed between the two calls, or no folder at all
            if not path.parent.is_dir():
                raise UserError(f"device folder {path.parent} does not exist: create it") from None
        except OSError as error:
            raise UserError(f"cannot open device {path}: {error.strerror}") from None


def attach(path: Path) -> tuple[int, int]:
    """Open the device file at ``path``, which must be there; returns its descriptor and its number of pages.

    Raises:
        UserError: There is none, or what is there is another user's or no device.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise UserError(f"there is no device {path}: start the process that lends it, on this machine") from None
    except OSError as error:
        raise UserError(f"cannot open device {path}: {error.strerror}") from None
    try:
        return fd, _check_file(fd, path)
    except UserError:
        os.close(fd)
        raise


def _try_create(path: Path, num_pages: int) -> int | None:
    """None if the name is taken."""
    header = _HEADER.pack(_MAGIC, PAGE_BYTES, num_pages * PAGE_BYTES)
    return try_create(path, header, (1 + num_pages) * PAGE_BYTES)


def try_create(path: Path, header: bytes, num_bytes: int) -> int | None:
    """Create a file that begins with ``header`` and appears under its name complete, by a link; returns its descriptor.

    None if the name is taken.

    Raises:
        OSError: It cannot be created; FileNotFoundError if there is no such folder.
    """
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


def capacity_of(fd: int) -> int:
    """Bytes of a device file that was attached to, without its header."""
    _, _, capacity_bytes = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    return int(capacity_bytes)


def _attach(path: Path, num_pages: int | None) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = _check_file(fd, path)
        if num_pages is not None and found != num_pages:
            raise UserError(
                f"device {path} has {found * PAGE_BYTES} bytes, not {num_pages * PAGE_BYTES}:"
                " ask for its size, remove it or use another name"
            )
    except UserError:
        os.close(fd)
        raise
    return fd


def _check_file(fd: int, path: Path) -> int:
    """The pages of a device that this user owns, as its header has them."""
    info = expect_own(fd, path)
    header = os.pread(fd, _HEADER.size, 0)
    magic, page_bytes, capacity_bytes = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    num_pages, rest = divmod(int(capacity_bytes), PAGE_BYTES)
    is_device = (magic, page_bytes, info.st_size) == (_MAGIC, PAGE_BYTES, PAGE_BYTES + capacity_bytes)
    if not is_device or rest or not num_pages:
        raise UserError(f"{path} is no floodplain device of this version: remove it or use another name")
    return num_pages


def expect_own(fd: int, path: Path) -> os.stat_result:
    """What the system says of a file that only this user can read or write.

    Raises:
        UserError: It is another user's, has another mode, or is no file.
    """
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o600:
        raise UserError(f"{path} must be this user's own file with mode 0600: remove it or use another name")
    return info
