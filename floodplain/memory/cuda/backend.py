"""The backend of a GPU: its device is the driver's memory, and neighbours are other GPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from floodplain.core.errors import UserError
from floodplain.memory.arena import Device
from floodplain.memory.backend import LINK_STAGING_BYTES
from floodplain.memory.cuda.device import measure_context_bytes, open_cuda_device
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.layer_line import CudaLayerLine, PieceCopier, compile_kernel
from floodplain.memory.cuda.peer import CudaPeerMemory, claim_cuda_home
from floodplain.memory.cuda.transfer import CudaTransferEngine, open_copies
from floodplain.memory.host.emulated_link import EmulatedLink, LinkPair
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.layer_line import LayerLine
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import SwapSlots, lock_pages, unlock_pages
from floodplain.memory.transfer import BlockStore

DEFAULT_KV_SHARE = 0.9
"""Share of the memory that is free once the parameters are loaded."""
NUM_GUESTS = 1
"""Consumers whose contexts get room beside what they borrow: placements give a producer one (AQUA, section 4)."""


class CudaBackend:
    """The ``Backend`` of one GPU. Made by ``open_cuda_backend``."""

    shares_host_memory = False
    piece_bytes = 16
    """Bytes that a lane of our kernels moves at a time (``memory.cuda.triton_copy``)."""

    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device lie."""
        return torch.device("cuda", self._index)

    def describe(self) -> str:
        """The GPU's name, for reports."""
        return torch.cuda.get_device_name(self._index)

    def open_device(
        self, layout: KVLayout, kv_bytes: int | None, param_bytes: int, shared_name: str | None
    ) -> tuple[Device, Callable[[], None]]:
        """Open the GPU's memory for one engine. Sizes are not checked: an allocation that does not fit fails later."""
        device = open_cuda_device(self._index)
        closing = ExitStack()
        closing.callback(torch.cuda.empty_cache)  # embedding, head and activations lie in torch's own pool
        if shared_name is not None:
            try:
                closing.callback(claim_cuda_home(shared_name, CudaDriver(self._index).uuid).close)
            except BaseException:
                device.close()
                raise
        closing.callback(device.close)
        return device, closing.close

    def default_kv_bytes(self, device: Device) -> int:
        """Bytes of the KV pool if no flag gives them: a share of what is free."""
        free = device.num_free_pages() * device.page_bytes
        return int(free * DEFAULT_KV_SHARE)

    def measure_guest_bytes(self) -> int:
        """Bytes that the contexts of ``NUM_GUESTS`` borrowers take of the GPU."""
        return NUM_GUESTS * measure_context_bytes(self._index)

    def open_host_tier(
        self, pool: BlockStore, num_slots: int, link: EmulatedLink | None = None
    ) -> tuple[SwapSlots, CudaTransferEngine]:
        """Page-locked swap space in host memory, and its started engine."""
        slots = SwapSlots(pool.layout, num_slots, is_pinned=True)
        staging_blocks = max(1, min(num_slots, LINK_STAGING_BYTES // pool.layout.block_bytes))
        return slots, open_copies(pool, self.torch_device, slots, staging_blocks).start()

    def open_layer_line(self, num_layers: int) -> LayerLine:
        """A started line for streamed layers."""
        driver = CudaDriver(self._index)
        if not driver.reads_host_memory:
            raise UserError(
                f"--kv-expansion copies layers by kernels that read the host's memory at its own addresses, and CUDA "
                f"device {self._index} cannot: leave it out"
            )
        compile_kernel(self.torch_device)
        return CudaLayerLine(self.torch_device, num_layers, lambda: PieceCopier(driver, self.torch_device))

    def open_layer_copy(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Page-locked memory for a streamed layer's copy, int32 of this shape, allocated at once."""
        words = torch.empty(shape, dtype=torch.int32)
        lock_pages(words, "lower --kv-expansion or --kv-memory")
        return words

    def close_layer_copy(self, words: torch.Tensor) -> None:
        """Unlock the memory of ``open_layer_copy``; no copy uses it any more."""
        unlock_pages(words)

    def open_peer_memory(self) -> CudaPeerMemory:
        """Memory of neighbours: GPUs of this machine."""
        return CudaPeerMemory(self._index)

    def open_copies(
        self,
        store: BlockStore,
        slots: PeerSlots,
        link: EmulatedLink | LinkPair | None = None,
        staging_blocks: int | None = None,
    ) -> CudaTransferEngine:
        """A started engine for copies to and from neighbours, staged like the best ones over a link by default."""
        staging_blocks = staging_blocks or max(1, LINK_STAGING_BYTES // store.layout.block_bytes)
        return open_copies(store, self.torch_device, slots, staging_blocks).start()


def open_cuda_backend(device: torch.device) -> CudaBackend:
    """The backend of a GPU; without an index, of the first one. Raises ``UserError`` if torch does not see that GPU."""
    index = device.index or 0
    num_gpus = torch.cuda.device_count()
    if not torch.cuda.is_available() or index >= num_gpus:
        told = f"--device {device} is not there: torch sees {num_gpus} CUDA devices"
        others = f"an index below {num_gpus}" if num_gpus else "install a build of torch for CUDA and a driver"
        raise UserError(f"{told}: give --device cpu, or {others}")
    return CudaBackend(index)
