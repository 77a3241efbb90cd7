"""Whose a host device is: the one engine that computes on it, and how its file comes and goes with that engine.

The home engine holds a lock on the file's header while it lives, however it ends. Everybody else is a visitor. The file
is removed when its home closes and nobody else owns a page of it; where somebody does, or the home was killed, it stays
for its pages' owners and for the next engine of the name. Whoever removes it locks all of it first: so no page is owned
then, and a visitor that has it open still finds at its next allocation that it has no name any more.
"""

from __future__ import annotations

import os
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.memory.device_file import PAGE_BYTES, attach_or_create
from floodplain.memory.file_locks import TO_THE_END, try_lock
from floodplain.memory.named_file import is_named


def claim_home(path: Path, num_pages: int) -> int:
    """Open the device file at ``path`` as its home, creating it if there is none; returns its descriptor.

    A file of another size that an engine left behind is replaced if nobody owns a page of it.

    Raises:
        UserError: Another engine is at home there; it has another size and its pages are owned; or the file is none
            that ``attach_or_create`` opens.
    """
    while True:
        fd, found_pages = attach_or_create(path, num_pages)
        try:
            if _is_home(fd, path, found_pages, num_pages):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # removed, by this call or by another one: look again


def _is_home(fd: int, path: Path, found_pages: int, num_pages: int) -> bool:
    if not try_lock(fd, 0, PAGE_BYTES):
        raise UserError(f"device {path} is another engine's, which runs: use another name")
    if not is_named(fd, path):
        return False
    if found_pages == num_pages:
        return True
    if not remove_if_idle(fd, path):
        raise UserError(
            f"device {path} of an engine before has {found_pages * PAGE_BYTES} bytes, not {num_pages * PAGE_BYTES}, and"
            " others still own memory of it: wait until they have freed it, ask for its size, or use another name"
        )
    return False


def remove_if_idle(fd: int, path: Path) -> bool:
    """Remove the file unless another description owns a page, or is at home; whether nobody did.

    ``fd`` then has a lock on everything, and must be closed.
    """
    if not try_lock(fd, 0, TO_THE_END):
        return False
    if is_named(fd, path):
        path.unlink()
    return True
