"""The shape of one model's KV cache on one device, its layers as a sequence of tensors, and blocks of one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import overload

import numpy as np
import torch

from floodplain.core.errors import InvariantError

_BLOCKS_PER_MOVE = 256
"""Blocks that one copy moves; bounds the copy's temporary."""


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


def read_blocks(words: torch.Tensor, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
    """A copy of blocks of a layer, int32 [blocks, words of a block]: uint8 [n, bytes of a block].

    On a CPU it is made by the calling thread, not by torch's, which compute.
    """
    rows = np.asarray(blocks, dtype=np.int64)
    if words.is_cpu:
        found: np.ndarray = words.numpy()[rows]
    else:
        found = words[torch.from_numpy(rows).to(words.device)].cpu().numpy()
    return found.view(np.uint8)


def write_blocks(words: torch.Tensor, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
    """Write blocks of a layer: the inverse of ``read_blocks``. ``InvariantError`` for ``data`` of another shape."""
    if data.dtype != np.uint8 or data.shape != (len(blocks), words.shape[1] * words.itemsize):
        raise InvariantError(f"{data.dtype} {data.shape} for {len(blocks)} blocks of {words.shape[1]} words")
    rows, new = np.asarray(blocks, dtype=np.int64), np.ascontiguousarray(data).view(np.int32)
    if words.is_cpu:
        words.numpy()[rows] = new
    else:
        words[torch.from_numpy(rows).to(words.device)] = torch.tensor(new, device=words.device)


def move_blocks(layers: Sequence[torch.Tensor], moves: Sequence[tuple[int, int]]) -> None:
    """Copy blocks to others (source, destination) in all layers, int32 [blocks, words of a block] each.

    Raises ``InvariantError`` if a block moves twice, or a destination is a source.
    """
    sources, destinations = [s for s, _ in moves], [d for _, d in moves]
    if len({*sources, *destinations}) < 2 * len(moves):
        raise InvariantError("a block is moved twice, or onto another that moves")
    for start in range(0, len(moves), _BLOCKS_PER_MOVE):
        part = slice(start, start + _BLOCKS_PER_MOVE)
        for device, on_device in groupby(layers, lambda words: words.device):
            origin = torch.tensor(sources[part], device=device)
            target = torch.tensor(destinations[part], device=device)
            for words in on_device:
                words[target] = words[origin]
