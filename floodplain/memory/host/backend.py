"""The backend of CPUs: its device is shared memory, and neighbours are other such devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from floodplain.core.errors import UserError
from floodplain.core.sizes import format_size, show_size
from floodplain.memory.arena import Device
from floodplain.memory.host.device import open_home_device, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.host.emulated_link import EmulatedLink, LinkPair
from floodplain.memory.host.layer_line import open_layer_line
from floodplain.memory.host.libc import keep_activation_pages
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.host_memory import available_bytes
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.layer_line import LayerLine
from floodplain.memory.peer.memory import HostPeerMemory
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockStore

DEFAULT_KV_BYTES = 2**30


class HostBackend:
    """The ``Backend`` of CPUs."""

    torch_device = torch.device("cpu")
    shares_host_memory = True
    piece_bytes = 1

    def describe(self) -> str:
        """The processor's name and the number of its cores, for reports."""
        return f"{_processor()}, {os.cpu_count()} cores"

    def open_device(
        self, layout: KVLayout, kv_bytes: int | None, param_bytes: int, shared_name: str | None
    ) -> tuple[Device, Callable[[], None]]:
        """Open memory for one engine, and let the process keep the memory of freed activations."""
        keep_activation_pages()
        kv_bytes = kv_bytes or DEFAULT_KV_BYTES
        _expect_available(kv_bytes, param_bytes, layout.dtype)
        quantum_bytes = layout.count_quantum_blocks(PAGE_BYTES) * layout.block_bytes
        capacity_bytes = kv_bytes + quantum_bytes + param_bytes + layout.num_layers * PAGE_BYTES
        if shared_name is None:
            device = open_private_device(capacity_bytes)
        else:
            device = open_home_device(shared_name, capacity_bytes)
        return device, device.close

    def default_kv_bytes(self, device: Device) -> int:
        """Bytes of the KV pool if no flag gives them: the same on any machine."""
        return DEFAULT_KV_BYTES

    def measure_guest_bytes(self) -> int:
        """0: a borrower takes nothing beside what it borrows."""
        return 0

    def open_host_tier(
        self, pool: BlockStore, num_slots: int, link: EmulatedLink | None = None
    ) -> tuple[SwapSlots, HostTransferEngine]:
        """Swap space in host memory, and its started engine."""
        slots = SwapSlots(pool.layout, num_slots)
        return slots, HostTransferEngine(pool, slots, link).start()

    def open_layer_line(self, num_layers: int) -> LayerLine:
        """A started line for streamed layers."""
        return open_layer_line(num_layers)

    def open_layer_copy(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for a streamed layer's copy, int32 of this shape, allocated page by page as blocks are used."""
        return torch.empty(shape, dtype=torch.int32)

    def close_layer_copy(self, words: torch.Tensor) -> None:
        """Do nothing: the memory is freed with its last tensor."""

    def open_peer_memory(self) -> HostPeerMemory:
        """Memory of neighbours: host devices of this machine."""
        return HostPeerMemory()

    def open_copies(
        self,
        store: BlockStore,
        slots: PeerSlots,
        link: EmulatedLink | LinkPair | None = None,
        staging_blocks: int | None = None,
    ) -> HostTransferEngine:
        """A started engine for copies to and from neighbours; nothing is staged."""
        return HostTransferEngine(store, slots, link).start()


def _expect_available(kv_bytes: int, param_bytes: int, dtype: torch.dtype) -> None:
    available = available_bytes()
    if param_bytes > available:
        smaller = "" if dtype == torch.bfloat16 else ", or --dtype bfloat16"
        raise UserError(
            f"the model's parameters take {show_size(param_bytes)}, more than the {show_size(available)} that this "
            f"machine has free: choose a smaller model{smaller}"
        )
    if kv_bytes > available - param_bytes:
        asked, left = format_size(kv_bytes), show_size(available - param_bytes)
        raise UserError(
            f"--kv-memory {asked} is more than the {left} that this machine has free beside the model's parameters: "
            "lower it, or choose a smaller model"
        )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
