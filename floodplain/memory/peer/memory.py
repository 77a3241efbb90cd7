"""Bytes on a neighbour's device: within a lease, the consumer allocates them there itself (design/005-leases.md).

No pointer leads into another process: this process owns the pages, and they are freed when it exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.host.arena import HostArena
from floodplain.memory.host.device import HostDevice, attach_device
from floodplain.memory.host.device_file import PAGE_BYTES


class Extent(Protocol):
    """A piece of a device's memory from ``address`` on, zeroed or of unspecified bytes. One thread at a time."""

    address: int
    num_bytes: int

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View it from its start, valid until ``close``; ``InvariantError`` if the extent is too small, or closed.

        Reading or writing the view raises torch.AcceleratorError if the device is gone.
        """

    def close(self) -> None:
        """Give the memory back to the device; views must be gone. A second call does nothing."""


class PeerMemory(Protocol):
    """Allocates extents on neighbours' devices, by whole pages of ``page_bytes``.

    A lease should be a multiple, or its rest is idle: requests for leases round up; ``allocate`` rounds down, so that
    it never takes more than was leased.
    """

    page_bytes: int

    def allocate(self, producer: str, num_bytes: int) -> Extent | None:
        """Take the whole pages in ``num_bytes`` on a producer's device; None without a whole page, or without room.

        ``UserError`` if the device cannot be reached from here.
        """


class HostPeerMemory:
    """Neighbours that are host devices of this machine, each under its producer's name.

    Safe to call from several threads, also to close extents: one thread may close what another had no time to close. A
    device stays attached only while it has extents, so that a device that was removed and created anew is found.
    """

    page_bytes = PAGE_BYTES

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._mutex = threading.RLock()
        self._devices: dict[str, HostDevice] = {}

    @property
    def num_owned_pages(self) -> dict[str, int]:
        """Pages that extents have taken, by producer."""
        return {producer: device.num_owned_pages for producer, device in self._devices.items()}

    def allocate(self, producer: str, num_bytes: int) -> HostExtent | None:
        """Take the whole pages in ``num_bytes`` on a producer's host device, zeroed; None as in ``PeerMemory``.

        Raises ``UserError`` if there is no such device, it is another user's, or too many mappings are needed.
        """
        num_pages = num_bytes // PAGE_BYTES
        if not num_pages:
            return None
        with self._mutex:
            device = self._devices.get(producer) or attach_device(producer, self._directory)
            self._devices[producer] = device
            try:
                arena = _fill_arena(device, num_pages)
            finally:
                self._leave_if_empty(producer)
        if arena is None:
            return None
        return HostExtent(arena, num_pages * PAGE_BYTES, lambda: self._leave_if_empty(producer))

    def _leave_if_empty(self, producer: str) -> None:
        with self._mutex:
            if producer in self._devices and not self._devices[producer].num_owned_pages:
                self._devices.pop(producer).close()


class HostExtent:
    """An ``Extent`` on a host device, behind the pages of ``arena``; ``on_close`` is called when they are free."""

    def __init__(self, arena: HostArena, num_bytes: int, on_close: Callable[[], None]) -> None:
        self.address = arena.tensor(torch.uint8, (num_bytes,)).data_ptr()
        self.num_bytes = num_bytes
        self._arena = arena
        self._on_close = on_close

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View the extent from its start. Host memory cannot be lost: a mapping outlives the name of its file."""
        if not self._arena.is_open:
            raise InvariantError("the extent is closed")
        return self._arena.tensor(dtype, shape)

    def close(self) -> None:
        """Free the pages, then call ``on_close``. A second call does nothing."""
        if self._arena.is_open:
            self._arena.close()
            self._on_close()


def _fill_arena(device: HostDevice, num_pages: int) -> HostArena | None:
    arena = device.reserve(num_pages)
    pages = device.allocate(num_pages)
    if pages is None:
        arena.close()
        return None
    try:
        arena.map(0, pages)
    except UserError:
        device.release(pages)
        arena.close()
        raise
    return arena
