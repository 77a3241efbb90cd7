"""The shape of one model's KV cache on one device, and the sizes that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one model's KV cache: its layers with KV, and the heads on this device."""

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """One layer's part of a block: K and V, tokens, heads, elements."""
        return (2, self.block_tokens, self.num_kv_heads, self.head_dim)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one layer's part of a block."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers, as in swap space; a pool's own may be fewer (``KVPool.block_bytes``)."""
        return self.num_layers * self.layer_block_bytes

    @property
    def layer_block_words(self) -> int:
        """32-bit words of one layer's part of a block; copies and digests work on words."""
        return self.layer_block_bytes // 4

    def count_quantum_blocks(self, page_bytes: int) -> int:
        """Blocks of the resize quantum on a device with such pages."""
        return math.lcm(self.layer_block_bytes, page_bytes) // self.layer_block_bytes
