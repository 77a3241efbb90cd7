"""The KV of a model's layers as a sequence of tensors; each access looks its tensor up anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload

import torch

from floodplain.core.errors import InvariantError


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
