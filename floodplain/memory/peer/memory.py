"""Bytes on a neighbour's device: within a lease, the consumer allocates them there itself (design/005-leases.md).

Nobody holds a pointer into another process: the pages are this process's own, and go when it ends.
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
    """A piece of a device's memory. One thread at a time.

    Attributes:
        address: Where it begins in this process, until ``close``.
        num_bytes: What may be used of it; fresh bytes are zero or unspecified.
    """

    address: int
    num_bytes: int

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View it from its start, valid until ``close``.

        Reading or writing the view raises torch.AcceleratorError if the device is gone.

        Raises:
            InvariantError: It is too small for that, or closed.
        """

    def close(self) -> None:
        """Give the memory back to the device; views must be gone. A second call does nothing."""


class PeerMemory(Protocol):
    """Where extents come from.

    Attributes:
        page_bytes: Memory is taken by whole pages. A lease should be a multiple, or its rest lies idle: who asks for
            one rounds up; ``allocate`` rounds down, so that it never takes more than was leased.
    """

    page_bytes: int

    def allocate(self, producer: str, num_bytes: int) -> Extent | None:
        """Take the whole pages in ``num_bytes`` on a producer's device; None if it has no room, or that is no page.

        Raises:
            UserError: The device cannot be reached from here.
        """


class HostPeerMemory:
    """Neighbours that are host devices of this machine, each under its producer's name.

    Safe to call from several threads, closing extents included: one may give back what another one had no time for.

    A device is attached to while there are extents on it, so that one that was removed and made anew is found.

    Args:
        directory: Where the devices' files lie; None as in ``open_home_device``.
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
        """See ``PeerMemory.allocate``. Fresh bytes are zero.

        Raises:
            UserError: There is no such device here, it is another user's, or too many mappings are needed.
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
    """See ``Extent``. Made by ``HostPeerMemory``.

    Args:
        arena: Its pages, from the first place on, and no others.
        num_bytes: Of them.
        on_close: Called when the pages are free.
    """

    def __init__(self, arena: HostArena, num_bytes: int, on_close: Callable[[], None]) -> None:
        self.address = arena.tensor(torch.uint8, (num_bytes,)).data_ptr()
        self.num_bytes = num_bytes
        self._arena = arena
        self._on_close = on_close

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``Extent.tensor``. The host's memory cannot be lost: what is mapped stays, whatever becomes of its name.

        Raises:
            InvariantError: It is too small for that, or closed.
        """
        if not self._arena.is_open:
            raise InvariantError("the extent is closed")
        return self._arena.tensor(dtype, shape)

    def close(self) -> None:
        """See ``Extent.close``."""
        if self._arena.is_open:
            self._arena.close()
            self._on_close()


def _fill_arena(device: HostDevice, num_pages: int) -> HostArena | None:
    """An arena of fresh pages; None if there are not as many."""
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
