"""Where blocks go that leave the pool: a bounded buffer of block-sized slots in host memory.

Which slot is whose is the business of ``core.tiers.SlotLedger``; here are the bytes, and the digest of each slot.
"""

from __future__ import annotations

import numpy as np
import torch

from floodplain.memory.kv_layout import KVLayout

EMPTY_DIGEST = 0
"""Of a slot that holds nothing whole. Should a block have this digest by chance, its restore is refused: a miss."""


class SwapSlots:
    """A fixed number of slots, each with room for one block of all layers.

    Args:
        layout: Shape of the cache.
        num_slots: How many.
        is_pinned: Whether the buffer is page-locked, for copies from and to a CUDA device.
    """

    def __init__(self, layout: KVLayout, num_slots: int, *, is_pinned: bool = False) -> None:
        self.layout = layout
        self.num_slots = num_slots
        shape = (num_slots, layout.num_layers, layout.layer_block_words)
        self.words = torch.empty(shape, dtype=torch.int32, pin_memory=is_pinned)
        """The bytes as 32-bit words: [num_slots, num_layers, layer_block_words]."""
        self.digests = np.full(num_slots, EMPTY_DIGEST, dtype=np.int64)
        """The digest of each slot, taken where its block was gathered."""
