"""Opens what copies on a GPU: between its KV pool and slots, and between the slots of two tiers."""

from __future__ import annotations

import torch

from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.stream import CudaStream
from floodplain.memory.cuda.transfer import CudaTransferEngine
from floodplain.memory.cuda.wires import PeerWire, PinnedEnd, PinnedWire, PoolEnd, Wire
from floodplain.memory.peer.slot_mover import SlotMover, SlotStore
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockStore


def open_pool_copies(
    pool: BlockStore, device: torch.device, slots: SwapSlots | PeerSlots, staging_blocks: int
) -> CudaTransferEngine:
    """The transfer engine of a KV pool on a GPU, not yet started.

    Args:
        pool: Its blocks are copied.
        device: The GPU on which it lies.
        slots: The slots, page-locked or on neighbours.
        staging_blocks: Blocks that are gathered at a time; each direction has such a buffer on the device.

    Raises:
        InvariantError: Slots in host memory are not page-locked.
    """
    end, wire = PoolEnd(pool, device), _open_wire(slots, device)
    return CudaTransferEngine(
        pool, slots, lambda direction: CudaStream(direction, device, pool.layout, end, wire, staging_blocks)
    )


class CudaSlotMover(SlotMover):
    """A ``SlotMover`` whose copies pass through staging on the GPU, which computes their digests.

    Args:
        host: The buffer; page-locked.
        peer: The slots on neighbours.
        device: The GPU; the neighbours' memory is mapped for it.
        staging_blocks: Blocks in staging at a time, in each direction.

    Raises:
        InvariantError: The buffer is not page-locked.
    """

    def __init__(self, host: SwapSlots, peer: PeerSlots, device: torch.device, staging_blocks: int) -> None:
        end, wire = PinnedEnd(host), _open_wire(peer, device)
        engine = CudaTransferEngine(
            SlotStore(host),
            peer,
            lambda direction: CudaStream(direction, device, host.layout, end, wire, staging_blocks),
        )
        super().__init__(host, peer, engine)


def _open_wire(slots: SwapSlots | PeerSlots, device: torch.device) -> Wire:
    if isinstance(slots, SwapSlots):
        return PinnedWire(slots)
    return PeerWire(slots, CudaDriver(device.index))
