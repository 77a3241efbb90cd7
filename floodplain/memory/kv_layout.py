"""The shape of one model's KV cache on one device, and its layers as a sequence of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

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


class LayerTensors(Sequence[torch.Tensor]):
    """One tensor for each layer, [max_blocks, 2, block_tokens, kv_heads, head_dim], looked up anew at each access.

    ``tensor_of`` raises ``InvariantError`` for a layer without memory here: touching its tensor would be a crash.
    """

    def __init__(self, num_layers: int, tensor_of: Callable[[int], torch.Tensor]) -> None:
        self._num_layers, self._tensor_of = num_layers, tensor_of

    def __len__(self) -> int:
        return self._num_layers

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        layers = range(len(self))[index]
        return self._tensor_of(layers) if isinstance(layers, int) else [self._tensor_of(layer) for layer in layers]
