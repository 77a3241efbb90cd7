"""The shape of one model's KV cache on one device, and its layers as a sequence of tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch

from floodplain.core.errors import InvariantError


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


class LayerTensors(Sequence[torch.Tensor], ABC):
    """One tensor for each layer, [max_blocks, 2, block_tokens, kv_heads, head_dim]."""

    @abstractmethod
    def _tensor_of(self, layer: int) -> torch.Tensor:
        """The tensor of a layer's KV now; raises ``InvariantError`` if the layer has no memory here."""

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        layers = range(len(self))[index]
        return self._tensor_of(layers) if isinstance(layers, int) else [self._tensor_of(layer) for layer in layers]


class PlacedLayers(LayerTensors):
    """Tensors of adjacent layers, ``first`` and following, by the index that a layer has in the whole model."""

    def __init__(self, tensors: Sequence[torch.Tensor], first: int) -> None:
        self._tensors, self._first = tensors, first

    def __len__(self) -> int:
        return self._first + len(self._tensors)

    def _tensor_of(self, layer: int) -> torch.Tensor:
        if layer < self._first:
            raise InvariantError(f"layer {layer} is another stage's")
        return self._tensors[layer - self._first]
