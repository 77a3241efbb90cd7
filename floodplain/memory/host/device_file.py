"""The file behind a host device: its header, its size, and what an attaching process checks."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size
from floodplain.memory.host import named_file

PAGE_BYTES = 64 * 1024
"""Unit of mapping on the host: fine enough for small models, and 2 MiB are 32 of them, not 512."""

_HEADER = struct.Struct("<8sIQ")  # magic, page bytes, capacity; alone in the first page of the file
_MAGIC = b"floodpl1"


def count_pages(capacity_bytes: int) -> int:
    """Whole pages in ``capacity_bytes``; at least one, or a UserError."""
    if capacity_bytes < PAGE_BYTES:
        raise UserError(f"a device needs at least {PAGE_BYTES} bytes, not {capacity_bytes}")
    return capacity_bytes // PAGE_BYTES


def create_anonymous(num_pages: int) -> int:
    """Create a file without a name; returns its descriptor. Raises ``UserError`` if a limit is lower."""
    fd, num_bytes = os.memfd_create("floodplain", os.MFD_CLOEXEC), (1 + num_pages) * PAGE_BYTES
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        told = f"no device of {show_size(num_bytes)} can be made ({error.strerror})"
        raise UserError(f"{told}: raise ulimit -f, or use a smaller KV pool") from error
    return fd


def attach_or_create(path: Path, num_pages: int) -> tuple[int, int]:
    """Open the device file at ``path``, or create it of that size; returns and raises as ``attach``."""
    header = _HEADER.pack(_MAGIC, PAGE_BYTES, num_pages * PAGE_BYTES)
    return _checked(named_file.open_or_create(path, header, (1 + num_pages) * PAGE_BYTES), path)


def attach(path: Path) -> tuple[int, int]:
    """Open the device file at ``path``, a ``UserError`` without; its descriptor, for ``leave``, and number of pages."""
    return _checked(named_file.open_existing(path), path)


def claim(path: Path, num_pages: int) -> int:
    """Open the device file at ``path`` as its home; returns its descriptor, to be closed by ``named_file.leave``.

    A file of another size is replaced, or ``UserError`` if others hold it, as if another engine is its home.
    """
    while True:
        fd, found_pages = attach_or_create(path, num_pages)
        try:
            named_file.claim(fd, path)
            if found_pages == num_pages:
                return fd
            if not named_file.remove_if_alone(fd, path):
                raise UserError(
                    f"device {path} of an engine before has {found_pages * PAGE_BYTES} bytes, not"
                    f" {num_pages * PAGE_BYTES}, and others still own memory of it: wait until they have freed it,"
                    " ask for its size, or use another name"
                )
        except BaseException:
            named_file.leave(fd, path)
            raise
        os.close(fd)  # the file is removed: try again


def _checked(fd: int, path: Path) -> tuple[int, int]:
    """The descriptor, closed unless its file is a device's, and the number of pages."""
    try:
        header = os.pread(fd, _HEADER.size, 0)
        magic, page_bytes, capacity_bytes = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        num_pages, rest = divmod(int(capacity_bytes), PAGE_BYTES)
        is_device = (magic, page_bytes, os.fstat(fd).st_size) == (_MAGIC, PAGE_BYTES, PAGE_BYTES + capacity_bytes)
        if not is_device or rest or not num_pages:
            raise UserError(f"{path} is no floodplain device of this version: remove it or use another name")
        return fd, num_pages
    except BaseException:
        os.close(fd)
        raise
