"""System calls that Python lacks: mmap with MAP_FIXED, holes in files, locks on bytes of a file, and the heap's limits.

The locks belong to an open description, fcntl(2): they are dropped when its last holder exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import struct

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_MADV_REMOVE = 9
_KEPT_HEAP_BYTES = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, len, pid

TO_THE_END = 0
"""As a length: to the end of the file, wherever that may be."""


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def reserve_range(num_bytes: int) -> int:
    """Reserve addresses with nothing behind them (any access is a fault); returns the first."""
    return _mmap(0, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)


def map_file(address: int, num_bytes: int, fd: int, offset: int, *, is_populated: bool = True) -> None:
    """Put bytes of a file from ``offset`` on, shared and whole system pages, behind reserved addresses.

    ``is_populated`` fills page tables at once, for memory that is there already; else it is taken page by page.
    """
    flags = mmap.MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if is_populated else 0)
    _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)


def discard_file(address: int, num_bytes: int) -> None:
    """Give the memory behind mapped bytes of a file back to the system; they stay mapped, and read as zeros."""
    if _libc().madvise(address, num_bytes, _MADV_REMOVE):
        raise _last_error("madvise")


def unmap_to_reserved(address: int, num_bytes: int) -> None:
    """Unmap what is behind the addresses; they stay reserved."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, num_bytes, _PROT_NONE, flags, -1, 0)


def free_range(address: int, num_bytes: int) -> None:
    """Give reserved addresses back, with everything mapped there."""
    if _libc().munmap(address, num_bytes):
        raise _last_error("munmap")


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give the memory behind a range of a file back to the system; the range reads as zeros."""
    if _libc().fallocate(fd, _FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, num_bytes):
        raise _last_error("fallocate")


def keep_activation_pages() -> None:
    """Let glibc keep the pages of freed activations: each step asks for the same sizes again (8 % of a prefill).

    Costs at most ``_KEPT_HEAP_BYTES`` of this process. Does nothing with another C library.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_HEAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)


def trim_heap() -> None:
    """Give the pages of freed heap memory back to the system, those of activations too; they are faulted in anew."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def try_lock(fd: int, start: int, length: int) -> bool:
    """Lock bytes for this description alone; False if another one has a lock on any of them, and nothing changed."""
    return _try_lock(fd, fcntl.F_WRLCK, start, length)


def try_share(fd: int, start: int, length: int) -> bool:
    """Lock bytes, shared; False, with nothing changed, if another description has any of them exclusively."""
    return _try_lock(fd, fcntl.F_RDLCK, start, length)


def unlock(fd: int, start: int, length: int) -> None:
    """Give up this description's locks on bytes."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack_lock(fcntl.F_UNLCK, start, length))


def find_lock(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """(first byte, length or ``TO_THE_END``) of one lock of another description on these bytes; None if free."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack_lock(fcntl.F_WRLCK, start, length))
    kind, _, first, num_bytes, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else (first, num_bytes)


def _try_lock(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack_lock(kind, start, length))
    except BlockingIOError:
        return False
    return True


def _pack_lock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def _mmap(address: int, num_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc().mmap(address, num_bytes, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _last_error("mmap")
    return int(result)


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
