"""Views of some layers of blocks and of slots, for copies that name a range of layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from floodplain.memory.swap_slots import SlotMemory
from floodplain.memory.transfer import BlockStore


class LayersOfStore:
    """Adjacent layers of another ``BlockStore``, as a ``BlockStore``.

    Args:
        store: The whole store.
        layers: Places in its ``words``.
    """

    def __init__(self, store: BlockStore, layers: range) -> None:
        self.layout = replace(store.layout, num_layers=len(layers))
        self._store, self._layers = store, layers
        self._all: tuple[torch.Tensor, ...] = ()
        self._words: tuple[torch.Tensor, ...] = ()

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """The tensors of these layers; a new tuple whenever the whole store has a new one."""
        words = self._store.words
        if words is not self._all:
            self._words = words[self._layers.start : self._layers.stop]
            self._all = words
        return self._words

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Raise ``InvariantError`` if a block has no memory."""
        self._store.expect_backed(blocks)


class LayersOfSlots:
    """Adjacent layers of other slots, as a ``SlotMemory``.

    Args:
        slots: The whole slots.
        layers: Which layers.
    """

    def __init__(self, slots: SlotMemory, layers: range) -> None:
        self.layout = replace(slots.layout, num_layers=len(layers))
        self._slots, self._layers = slots, layers

    def part(self, first: int, count: int) -> torch.Tensor:
        """These layers of adjacent slots as 32-bit words: [count, number of layers, layer_block_words]."""
        return self._slots.part(first, count)[:, self._layers.start : self._layers.stop]

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Where these layers begin in each of these slots (int64 [n]): uint64 [n]."""
        return self._slots.addresses(slots) + np.uint64(self._layers.start * self.layout.layer_block_bytes)
