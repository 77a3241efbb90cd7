"""Swap space in host memory, of a host device or a GPU."""

from __future__ import annotations

import torch

from floodplain.memory.host.emulated_link import EmulatedLink
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.swap_space import SwapTier
from floodplain.memory.transfer import BlockStore

LINK_STAGING_BYTES = 64 * 2**20
"""Gathered at a time on a device: NVLink reaches its full bandwidth with copies of this size (AQUA, section 7)."""


def open_host_tier(
    pool: BlockStore, device: torch.device, num_slots: int, emulated: EmulatedLink | None = None
) -> tuple[SwapSlots, SwapTier]:
    """Swap space in host memory, page-locked for a GPU, all of which is there when this returns.

    Args:
        pool: Its blocks leave for there.
        device: Where the pool lies.
        num_slots: Blocks that it holds.
        emulated: On a CPU, paces the copies.
    """
    is_cuda = device.type == "cuda"
    slots = SwapSlots(pool.layout, num_slots, is_pinned=is_cuda)
    if is_cuda:
        from floodplain.memory.cuda.copies import open_pool_copies

        staging_blocks = max(1, min(num_slots, LINK_STAGING_BYTES // pool.layout.block_bytes))
        return slots, SwapTier(slots, open_pool_copies(pool, device, slots, staging_blocks).start())
    slots.words.zero_()  # memory that is missing shows now, and no copy waits for its first touch
    return slots, SwapTier(slots, HostTransferEngine(pool, slots, emulated).start())
