"""What depends on the kind of a device: where its memory comes from, and what copies to and from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from floodplain.memory.arena import Device
from floodplain.memory.host.emulated_link import EmulatedLink, LinkPair
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.layer_line import LayerLine
from floodplain.memory.peer.memory import PeerMemory
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockStore, CopyEngine

LINK_STAGING_BYTES = 64 * 2**20
"""Gathered at a time on a device: NVLink reaches its full bandwidth with copies of this size (AQUA, section 7)."""


class Backend(Protocol):
    """One kind of device, chosen once by ``memory.backend_choice``: ``HostBackend`` or ``CudaBackend``."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device lie."""

    @property
    def shares_host_memory(self) -> bool:
        """Whether the KV pool, swap space and neighbours' devices all lie in the host's memory."""

    @property
    def piece_bytes(self) -> int:
        """Each layer's part of a KV block must begin at, and have, a multiple of so many bytes."""

    def describe(self) -> str:
        """The hardware's name, for reports."""

    def open_device(
        self, layout: KVLayout, kv_bytes: int | None, param_bytes: int, shared_name: str | None
    ) -> tuple[Device, Callable[[], None]]:
        """Open the memory that one engine computes in: the device, and what closes all that was opened, once or twice.

        ``kv_bytes`` None takes the default. Neighbours find the device as ``shared_name`` until it is closed. Raises
        ``UserError`` if there is less memory, or another engine has that name.
        """

    def default_kv_bytes(self, device: Device) -> int:
        """Bytes of the KV pool if no flag gives them; ask when the parameters are loaded."""

    def measure_guest_bytes(self) -> int:
        """Bytes that borrowers take beside what they borrow; offers exclude them. ``UserError`` if none can borrow."""

    def open_host_tier(
        self, pool: BlockStore, num_slots: int, link: EmulatedLink | None = None
    ) -> tuple[SwapSlots, CopyEngine[Any]]:
        """Swap space in host memory for ``num_slots`` blocks, allocated now, and its started engine.

        On a CPU ``link`` paces the copies. Raises ``UserError`` if the system does not give that much memory.
        """

    def open_layer_line(self, num_layers: int) -> LayerLine:
        """A started line for streamed layers; raises ``UserError`` if layers cannot stream on this device."""

    def open_layer_copy(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for a streamed layer's copy, int32 of this shape; ``UserError`` if the system does not give it."""

    def close_layer_copy(self, words: torch.Tensor) -> None:
        """Free the memory of ``open_layer_copy``; no copy uses it any more."""

    def open_peer_memory(self) -> PeerMemory:
        """Memory of neighbours of the same kind; raises ``UserError`` if no visible device can be borrowed from."""

    def open_copies(
        self,
        store: BlockStore,
        slots: PeerSlots,
        link: EmulatedLink | LinkPair | None = None,
        staging_blocks: int | None = None,
    ) -> CopyEngine[Any]:
        """A started engine for copies between ``store``, the pool or a ``SlotStore``, and slots on neighbours.

        CPU copies keep to ``link``. On a GPU ``staging_blocks`` pass through its memory at a time, in each direction.
        """
