"""Where blocks go that leave the pool: a bounded buffer of block-sized slots in host memory.

Which slot is whose is the business of ``core.tiers.SlotLedger``; here are the bytes, and the digest of each slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from floodplain.core.errors import UserError
from floodplain.memory.kv_layout import KVLayout

EMPTY_DIGEST = 0
"""Of a slot that holds nothing whole. Should a block have this digest by chance, its restore is refused: a miss."""


class SwapSlots:
    """A fixed number of slots, each with room for one block of all layers.

    Args:
        layout: Shape of the cache.
        num_slots: How many.
        is_pinned: Whether the buffer is page-locked, for copies from and to a CUDA device.

    Raises:
        UserError: The system does not lock that much memory.
    """

    def __init__(self, layout: KVLayout, num_slots: int, *, is_pinned: bool = False) -> None:
        self.layout = layout
        self.num_slots = num_slots
        shape = (num_slots, layout.num_layers, layout.layer_block_words)
        self.words = torch.empty(shape, dtype=torch.int32)
        """The bytes as 32-bit words: [num_slots, num_layers, layer_block_words]."""
        self.digests = np.full(num_slots, EMPTY_DIGEST, dtype=np.int64)
        """The digest of each slot, taken where its block was gathered."""
        self._is_locked = False
        if is_pinned:
            self._lock()

    def close(self) -> None:
        """Unlock the pages, once no copy uses them any more. Safe to call twice."""
        if self._is_locked:
            self._is_locked = False
            torch.cuda.check_error(int(_cuda_runtime().cudaHostUnregister(self.words.data_ptr())))

    def _lock(self) -> None:
        """Exactly these pages: torch's own page-locked memory comes in powers of two, and it keeps it."""
        num_bytes = self.words.nbytes
        if int(_cuda_runtime().cudaHostRegister(self.words.data_ptr(), num_bytes, 0)):
            raise UserError(f"the system locks no {num_bytes} bytes of memory: lower --swap-memory")
        self._is_locked = True


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
