"""What the PEER tier is made of, beside the leases: on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from floodplain.lending.peer_tier import BLOCKS_PER_RELOCATION
from floodplain.memory.host.emulated_link import EmulatedLink
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.peer.memory import HostPeerMemory, PeerMemory
from floodplain.memory.peer.slot_mover import HostSlotMover, LinkPair, SlotMover
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.swap_space import SwapTier
from floodplain.memory.transfer import BlockStore

CHUNK_BYTES = 32 * 2**20
"""Of a lease, about: a recall takes back no more than it must, and a chunk is quick to empty."""


@dataclass(frozen=True, slots=True)
class PeerParts:
    """See the module.

    Attributes:
        memory: Of the neighbours.
        slots: Without memory.
        mover: Between them and the host's; started.
    """

    memory: PeerMemory
    slots: PeerSlots
    mover: SlotMover


def make_peer_slots(layout: KVLayout, num_bytes: int) -> PeerSlots:
    """For at most so much of the neighbours' memory, rounded down to whole chunks, but one at least."""
    chunk_slots = max(1, CHUNK_BYTES // layout.block_bytes)
    return PeerSlots(layout, chunk_slots, max(1, num_bytes // (chunk_slots * layout.block_bytes)))


def open_host_parts(
    pool: BlockStore, host: SwapSlots, slots: PeerSlots, near: EmulatedLink | None, far: EmulatedLink | None
) -> tuple[SwapTier, PeerParts]:
    """Of an engine on a CPU, whose neighbours are host devices of this machine.

    Args:
        pool: Of the engine.
        host: Its slots in host memory.
        slots: On neighbours; without memory.
        near: Paces copies to neighbours; None lets them run as fast as this machine does.
        far: Paces copies to host memory.
    """
    tier = SwapTier(slots, HostTransferEngine(pool, slots, near).start())
    pair = None if near is None or far is None else LinkPair(far, near)
    return tier, PeerParts(HostPeerMemory(), slots, HostSlotMover(host, slots, pair).start())


def open_cuda_parts(
    pool: BlockStore, device: torch.device, host: SwapSlots, slots: PeerSlots, staging_blocks: int
) -> tuple[SwapTier, PeerParts]:
    """Of an engine on a GPU, whose neighbours are GPUs of this machine.

    Args:
        pool: Of the engine.
        device: The GPU on which it lies.
        host: Its slots in host memory; page-locked.
        slots: On neighbours; without memory.
        staging_blocks: Gathered at a time for a copy to or from the pool.

    Raises:
        UserError: There is no cuda-bindings.
    """
    from floodplain.memory.cuda.copies import CudaSlotMover, open_pool_copies
    from floodplain.memory.cuda.peer import CudaPeerMemory

    memory = CudaPeerMemory(device.index)
    tier = SwapTier(slots, open_pool_copies(pool, device, slots, staging_blocks).start())
    return tier, PeerParts(memory, slots, CudaSlotMover(host, slots, device, BLOCKS_PER_RELOCATION).start())
