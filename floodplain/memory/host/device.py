"""A device made of shared memory, whose pages are owned by processes, as a GPU's memory is (docs/design/001).

It is one file of ``capacity_bytes``. A process owns a page by holding an open-file-description lock on the page's bytes
(``F_OFD_SETLK``, fcntl(2)). The kernel drops such locks when the owner exits, by SIGKILL too, and keeps them while it
is stopped. A child made by fork without exec keeps the pages owned: start helpers with spawn.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Page
from floodplain.memory.host import device_file, libc, named_file
from floodplain.memory.host.arena import HostArena, MappingBudget
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.runs import find_runs


class HostDevice:
    """A ``Device`` of shared memory. Made by one of the functions below; safe to use from several threads.

    All users share the locks of its ``fd``, so pages owned here are also kept in a set. ``path`` is None for a file
    without a name. ``is_home``: this process computes on the device, and ``fd`` has the lock for that.
    """

    page_bytes = PAGE_BYTES

    def __init__(self, fd: int, capacity_pages: int, path: Path | None = None, *, is_home: bool = False) -> None:
        self.capacity_pages = capacity_pages
        self._fd = fd
        self._path = path
        self._is_home = is_home
        self._is_open = True
        self._is_owned = np.zeros(capacity_pages, dtype=np.bool_)
        self._mutex = threading.RLock()
        self._budget = MappingBudget.of_this_process()
        self._arenas: list[HostArena] = []

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def num_owned_pages(self) -> int:
        """Pages allocated through this object."""
        return int(np.count_nonzero(self._is_owned))

    def num_free_pages(self) -> int:
        """Pages that have no owner now."""
        with self._mutex:
            return int(np.count_nonzero(self._find_free()))

    def num_foreign_pages(self) -> int:
        """Pages that other owners have now, from one scan; all pages if the device is closed, and cannot be scanned."""
        with self._mutex:
            if not self._is_open:
                return self.capacity_pages
            return self.capacity_pages - self.num_owned_pages - int(np.count_nonzero(self._find_free()))

    def forget_others(self) -> None:
        """Do nothing: locks show the owner of each page."""

    def cap_torch(self, kept_bytes: int) -> None:
        """Do nothing: torch allocates elsewhere."""

    def backing(self) -> tuple[Path, int] | None:
        """The folder, such as ``/dev/shm``, and its free bytes, which a container may limit; None without a name."""
        if self._path is None:
            return None
        room = os.fstatvfs(self._fd)
        return self._path.parent, room.f_bavail * room.f_frsize

    def allocate(self, num_pages: int) -> list[Page] | None:
        """Take zeroed pages, in runs as long as possible; None, with none taken, if there are too few.

        A named device reserves their memory at once: a full /dev/shm would kill the process with SIGBUS later. If the
        file was removed by hand, a process that is not its home gets none, since no other could map them. Pages of a
        private device take memory when they are written.
        """
        taken: list[Page] = []
        with self._mutex:
            while len(taken) < num_pages:
                runs = _choose_runs(find_runs(np.flatnonzero(self._find_free())), num_pages - len(taken))
                if runs is None or not self._acquire_all(runs, taken):
                    self.release(taken)
                    return None
            if self._is_removed():
                self.release(taken)
                return None
        return taken

    def release(self, pages: Sequence[Page]) -> None:
        """Give unmapped pages back, first their memory, then the ownership; ``InvariantError`` if one is not owned."""
        with self._mutex:
            if not self._is_owned[list(pages)].all():
                raise InvariantError("pages are released that are not owned")
            for first, count in find_runs(sorted(pages)):
                libc.punch_hole(self._fd, *self._extent(first, count))
                self._unlock(first, count)

    def reserve(self, num_pages: int) -> HostArena:
        """Reserve an arena; closed with the device if not before."""
        is_reserved = self._path is not None
        arena = HostArena(self._fd, num_pages, self._budget, self.release, is_reserved=is_reserved)
        self._arenas = [*(a for a in self._arenas if a.is_open), arena]
        return arena

    def close(self) -> None:
        """Close all arenas and give up every page, once; the last process to close a named device removes it."""
        with self._mutex:
            if not self._is_open:
                return
            for arena in self._arenas:
                arena.close()
            self.release([Page(page) for page in np.flatnonzero(self._is_owned).tolist()])
            self._is_open = False
            if self._path is None:
                os.close(self._fd)
            else:
                named_file.leave(self._fd, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_removed(self) -> bool:
        return not (self._is_home or self._path is None or named_file.is_named(self._fd, self._path))

    def _extent(self, first: int, count: int) -> tuple[int, int]:
        return PAGE_BYTES * (1 + first), PAGE_BYTES * count

    def _find_free(self) -> np.ndarray:
        """Which pages have no owner, bool [capacity_pages]. The kernel names one conflicting lock at a time."""
        is_free = ~self._is_owned
        unknown = [(0, self.capacity_pages)]
        while unknown:
            first, end = unknown.pop()
            found = libc.find_lock(self._fd, *self._extent(first, end - first))
            if found is None:
                continue
            start, length = found
            lock_first = max(start // PAGE_BYTES - 1, first)
            lock_end = min((start + length) // PAGE_BYTES - 1, end) if length else end
            is_free[lock_first:lock_end] = False
            unknown += [part for part in ((first, lock_first), (lock_end, end)) if part[0] < part[1]]
        return is_free

    def _acquire_all(self, runs: list[tuple[int, int]], taken: list[Page]) -> bool:
        """Own and back runs, adding to ``taken``; skip a run that another process just took. False without memory."""
        for first, count in runs:
            if not self._try_lock(first, count):
                continue
            extent = self._extent(first, count)
            libc.punch_hole(self._fd, *extent)
            if self._path is not None and not self._reserve_memory(*extent):
                self._unlock(first, count)
                return False
            taken += map(Page, range(first, first + count))
        return True

    def _reserve_memory(self, offset: int, num_bytes: int) -> bool:
        try:
            os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return True

    def _try_lock(self, first: int, count: int) -> bool:
        if not libc.try_lock(self._fd, *self._extent(first, count)):
            return False
        self._is_owned[first : first + count] = True
        return True

    def _unlock(self, first: int, count: int) -> None:
        self._is_owned[first : first + count] = False
        libc.unlock(self._fd, *self._extent(first, count))


def open_private_device(capacity_bytes: int) -> HostDevice:
    """Make a device that only this process can open; it is freed when the process exits."""
    num_pages = device_file.count_pages(capacity_bytes)
    return HostDevice(device_file.create_anonymous(num_pages), num_pages)


def open_home_device(name: str, capacity_bytes: int, directory: Path | None = None) -> HostDevice:
    """Open the machine's device ``name`` as its home, the one engine that computes on it, until it is closed.

    Pages that others borrowed from an earlier run stay theirs. A file of another size that no process has open is
    replaced. It is ``floodplain-NAME`` in ``directory``; None is /dev/shm, or the temporary folder without it.

    Raises ``UserError`` if the name is bad, the file is another user's, no device, or in use with another size or home.
    """
    num_pages, path = device_file.count_pages(capacity_bytes), named_file.find_path(name, directory)
    return HostDevice(device_file.claim(path, num_pages), num_pages, path, is_home=True)


def attach_device(name: str, directory: Path | None = None) -> HostDevice:
    """Attach to the device ``name`` of another process, of any size; ``UserError`` if none is there."""
    path = named_file.find_path(name, directory)
    return HostDevice(*device_file.attach(path), path)


def _choose_runs(runs: list[tuple[int, int]], num_pages: int) -> list[tuple[int, int]] | None:
    """Cover ``num_pages`` by as few runs as can be: the smallest that is enough, else the largest first."""
    enough = [run for run in runs if run[1] >= num_pages]
    if enough:
        return [(min(enough, key=lambda run: run[1])[0], num_pages)]
    chosen: list[tuple[int, int]] = []
    missing = num_pages
    for first, count in sorted(runs, key=lambda run: (-run[1], run[0])):
        chosen.append((first, min(count, missing)))
        missing -= chosen[-1][1]
        if not missing:
            return chosen
    return None
