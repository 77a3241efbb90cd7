"""Locks on bytes of a file that belong to an open description, fcntl(2): dropped when its last holder exits."""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, len, pid

TO_THE_END = 0
"""As a length: to the end of the file, wherever that may be."""


def try_lock(fd: int, start: int, length: int) -> bool:
    """Lock bytes for this description alone; False if another one has a lock on any of them, and nothing changed."""
    return _try(fd, fcntl.F_WRLCK, start, length)


def try_share(fd: int, start: int, length: int) -> bool:
    """Lock bytes, shared; False, with nothing changed, if another description has any of them exclusively."""
    return _try(fd, fcntl.F_RDLCK, start, length)


def unlock(fd: int, start: int, length: int) -> None:
    """Give up this description's locks on bytes."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(fcntl.F_UNLCK, start, length))


def find_lock(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """(first byte, length) of any one lock of another description on these bytes, shared or not; None without one.

    A length of ``TO_THE_END`` may come back.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, start, length))
    kind, _, first, num_bytes, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else (first, num_bytes)


def _try(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(kind, start, length))
    except BlockingIOError:
        return False
    return True


def _pack(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
