"""An arena over a host device's file: pages are mapped with MAP_FIXED into a range reserved with PROT_NONE."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.sizes import show_size
from floodplain.memory.arena import Page
from floodplain.memory.host import libc
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.runs import find_runs

_HOLE = -1
_SPARE_MAPPINGS = 4096
"""Mappings left to holes, and to everything else in the process: libraries and thread stacks that come later."""


class MappingBudget:
    """How many mappings the arenas of a process may make below ``vm.max_map_count``; the kernel would fail halfway."""

    def __init__(self, max_mappings: int) -> None:
        self.max_mappings = max_mappings
        self.num_mappings = 0

    @classmethod
    def of_this_process(cls) -> MappingBudget:
        """The budget that the system's limit leaves beside the mappings that exist now."""
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open() as maps:
            return cls(limit - sum(1 for _ in maps) - _SPARE_MAPPINGS)

    def add(self, num_mappings: int) -> None:
        """Count mappings that a map makes (or saves, if negative); ``UserError``, and nothing counted, if too many."""
        if num_mappings > 0 and self.num_mappings + num_mappings > self.max_mappings:
            raise UserError(
                f"too many memory mappings: {self.num_mappings + num_mappings} needed, {self.max_mappings} left by"
                " vm.max_map_count; raise it (sysctl -w vm.max_map_count=262144) or use a smaller KV pool"
            )
        self.num_mappings += num_mappings


class HostArena:
    """An ``Arena`` over a host device's file. Made by ``HostDevice.reserve``.

    The arenas of a device share ``budget``; ``release`` takes the pages that are still mapped at ``close``; with
    ``is_reserved`` pages have memory before they are mapped.
    """

    page_bytes = PAGE_BYTES

    def __init__(
        self,
        fd: int,
        num_pages: int,
        budget: MappingBudget,
        release: Callable[[Sequence[Page]], None],
        *,
        is_reserved: bool = True,
    ) -> None:
        self.num_pages = num_pages
        self._fd = fd
        self._budget = budget
        self._is_reserved = is_reserved
        self._release = release
        self._table = np.full(num_pages, _HOLE, dtype=np.int64)  # place -> page
        num_bytes = num_pages * PAGE_BYTES
        try:
            self._address: int | None = libc.reserve_range(num_bytes)
        except OSError as error:
            told = f"no {show_size(num_bytes)} of addresses can be reserved ({error.strerror})"
            raise UserError(f"{told}: raise ulimit -v, or use a smaller KV pool") from error
        # Views keep this alive, and it keeps the addresses reserved: a stale view faults, and never shows other bytes.
        self._memory: ctypes.Array[ctypes.c_uint8] | None = (ctypes.c_uint8 * num_bytes).from_address(self._address)
        weakref.finalize(self._memory, libc.free_range, self._address, num_bytes).atexit = False
        budget.add(1)

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called."""
        return self._address is not None

    def map(self, offset_page: int, pages: Sequence[Page]) -> None:
        """Map pages, in order, from the ``offset_page``-th page on."""
        places = self._places(offset_page, len(pages))
        if (self._table[places] != _HOLE).any():
            raise InvariantError(f"pages {offset_page}+{len(pages)} of the arena are mapped already")
        new = np.asarray(pages, dtype=np.int64)
        self._budget.add(self._count_new_mappings(places, new))
        self._table[places] = new
        place = offset_page
        for page, count in find_runs(pages):
            offset = (1 + page) * PAGE_BYTES
            num_bytes = count * PAGE_BYTES
            libc.map_file(self._address_of(place), num_bytes, self._fd, offset, is_populated=self._is_reserved)
            place += count

    def unmap(self, offset_page: int, num_pages: int) -> list[Page]:
        """Unmap and return pages; their addresses stay reserved."""
        places = self._places(offset_page, num_pages)
        pages = [Page(page) for page in self._table[places].tolist()]
        if _HOLE in pages:
            raise InvariantError(f"pages {offset_page}+{num_pages} of the arena are not all mapped")
        if pages:
            holes = np.full(num_pages, _HOLE, dtype=np.int64)
            # A hole may split a mapping; giving memory back is never refused for that.
            self._budget.num_mappings += self._count_new_mappings(places, holes)
            self._table[places] = holes
            libc.unmap_to_reserved(self._address_of(offset_page), num_pages * PAGE_BYTES)
        return pages

    def discard(self, offset_page: int, num_pages: int) -> bool:
        """Free the memory of mapped pages until they are written; False except on a private device."""
        if self._is_reserved:
            return False
        if (self._table[self._places(offset_page, num_pages)] == _HOLE).any():
            raise InvariantError(f"pages {offset_page}+{num_pages} of the arena are not all mapped")
        libc.discard_file(self._address_of(offset_page), num_pages * PAGE_BYTES)
        return True

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View the range from its start; a view keeps the range reserved."""
        num_elements = math.prod(shape)
        if num_elements * dtype.itemsize > self.num_pages * PAGE_BYTES:
            raise InvariantError(f"a {dtype} tensor of shape {shape} is larger than its arena")
        if self._memory is None:
            raise InvariantError("the arena is closed")
        return torch.frombuffer(self._memory, dtype=dtype, count=num_elements).view(shape)

    def close(self) -> None:
        """Unmap and release all pages. A second call does nothing. The range stays reserved while views of it exist."""
        if self._address is None:
            return
        libc.unmap_to_reserved(self._address, self.num_pages * PAGE_BYTES)
        self._address = self._memory = None
        self._budget.add(-1 - self._count_borders(self._table))
        self._release([Page(page) for page in self._table[self._table != _HOLE].tolist()])

    def _address_of(self, place: int) -> int:
        if self._address is None:
            raise InvariantError("the arena is closed")
        return self._address + place * PAGE_BYTES

    def _places(self, offset_page: int, num_pages: int) -> slice:
        if offset_page < 0 or offset_page + num_pages > self.num_pages:
            raise InvariantError(f"pages {offset_page}+{num_pages} are outside an arena of {self.num_pages}")
        return slice(offset_page, offset_page + num_pages)

    def _count_new_mappings(self, places: slice, pages: np.ndarray) -> int:
        """How many more mappings there are once ``pages`` lie at ``places``; their borders to the neighbours count."""
        around = slice(max(places.start - 1, 0), places.stop + 1)
        before = self._table[around]
        after = before.copy()
        after[places.start - around.start :][: len(pages)] = pages
        return self._count_borders(after) - self._count_borders(before)

    @staticmethod
    def _count_borders(table: np.ndarray) -> int:
        """Count adjacent places that the kernel cannot keep in one mapping."""
        left, right = table[:-1], table[1:]
        is_joined = ((left == _HOLE) & (right == _HOLE)) | ((left != _HOLE) & (right == left + 1))
        return int(np.count_nonzero(~is_joined))
