"""Connects staging on a GPU with blocks and slots elsewhere; all copies are enqueued on the current CUDA stream.

A *wire* copies rows of staging to and from adjacent slots: page-locked ones through torch, a neighbour's through the
driver. torch would copy between two GPUs on a stream of the source's device, with a context there; the driver's call
stays on our stream, and our copy engine does all of it.

An *end* is where blocks are: it fills staging with them, or empties it into them, and adds up their digests.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.runs import find_runs
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockStore


class Wire(Protocol):
    """Copies between rows of staging, int32 [n, num_layers, layer_block_words], and as many adjacent slots."""

    def copy(self, direction: Direction, rows: torch.Tensor, first: int) -> None:
        """Enqueue a copy on the current stream: OUTBOUND copies staging to the slots from ``first`` on."""


class PinnedWire:
    """A ``Wire`` to page-locked memory of the host; raises ``InvariantError`` if the slots are not page-locked."""

    def __init__(self, slots: SwapSlots) -> None:
        if not slots.words.is_pinned():
            raise InvariantError("slots for CUDA copies must be page-locked")
        self._slots = slots

    def copy(self, direction: Direction, rows: torch.Tensor, first: int) -> None:
        """Enqueue a copy between rows of staging and the slots from ``first`` on."""
        far = self._slots.part(first, len(rows))
        target, source = (far, rows) if direction is Direction.OUTBOUND else (rows, far)
        target.copy_(source, non_blocking=True)


class PeerWire:
    """A ``Wire`` to memory on neighbours, which the caller keeps in place (``Slots.use``), by our device's driver."""

    def __init__(self, slots: PeerSlots, driver: CudaDriver) -> None:
        self._slots = slots
        self._driver = driver

    def copy(self, direction: Direction, rows: torch.Tensor, first: int) -> None:
        """Enqueue copies between rows of staging and slots, one for each chunk that the slots lie in."""
        block_bytes = self._slots.layout.block_bytes
        stream = self._driver.api.CUstream(_current_stream(rows.device))
        near = rows.data_ptr()
        for far, count in self._slots.pieces(first, len(rows)):
            target, source = (far, near) if direction is Direction.OUTBOUND else (near, far)
            self._driver.call(self._driver.api.cuMemcpyDtoDAsync, target, source, count * block_bytes, stream)
            near += count * block_bytes


class End(Protocol):
    """The side of a copy on which its blocks are."""

    def copy(self, direction: Direction, blocks: np.ndarray, staging: torch.Tensor, digests: torch.Tensor) -> None:
        """OUTBOUND fills the first rows of staging with these blocks (int64 [n]), INBOUND copies them from there.

        Their digests are added to ``digests``, int64 [n] on the device.
        """


class PoolEnd:
    """An ``End`` at the KV pool, whose scattered blocks a kernel of our own device gathers and scatters."""

    def __init__(self, pool: BlockStore, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._read_addresses()

    def copy(self, direction: Direction, blocks: np.ndarray, staging: torch.Tensor, digests: torch.Tensor) -> None:
        """Gather or scatter blocks, and add to their digests; on the current stream.

        torch reuses memory of a stream in that stream's order, and page-locked memory only after its copies: so the
        temporary here may be dropped at once.
        """
        from floodplain.memory.cuda.triton_copy import gather, scatter

        if self._words is not self._pool.words:
            self._read_addresses()
        places = torch.from_numpy(blocks).pin_memory().to(self._device, non_blocking=True)
        run = gather if direction is Direction.OUTBOUND else scatter
        run(self._bases, places, staging, digests)

    def _read_addresses(self) -> None:
        """Read the layers' addresses. ``_words`` is set last: another thread that finds it current uses them."""
        words = self._pool.words
        bases = [one.data_ptr() for one in words]
        self._bases = torch.tensor(bases, dtype=torch.int64, device=self._device)
        self._words = words


class PinnedEnd:
    """An ``End`` at page-locked slots of the host, for copies to and from another tier."""

    def __init__(self, slots: SwapSlots) -> None:
        self._wire = PinnedWire(slots)

    def copy(self, direction: Direction, blocks: np.ndarray, staging: torch.Tensor, digests: torch.Tensor) -> None:
        """Copy slots to or from staging, and add the digests of what passed through staging."""
        from floodplain.memory.cuda.triton_copy import add_digests

        row = 0
        for first, count in find_runs(blocks):
            self._wire.copy(direction.opposite, staging[row : row + count], first)
            row += count
        add_digests(staging[:row], digests)


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
