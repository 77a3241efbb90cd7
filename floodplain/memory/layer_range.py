"""Some layers of blocks and of slots: what a copy moves that names a range of layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from floodplain.memory.swap_slots import SlotMemory
from floodplain.memory.transfer import BlockStore


class LayersOfStore:
    """See ``BlockStore``: adjacent layers of another one.

    Args:
        store: The other one.
        layers: Which of its ``words``.
    """

    def __init__(self, store: BlockStore, layers: range) -> None:
        self.layout = replace(store.layout, num_layers=len(layers))
        self._store, self._layers = store, layers
        self._all: tuple[torch.Tensor, ...] = ()
        self._words: tuple[torch.Tensor, ...] = ()

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """See ``BlockStore.words``: a new tuple when that of the other one is."""
        words = self._store.words
        if words is not self._all:
            self._words = words[self._layers.start : self._layers.stop]
            self._all = words
        return self._words

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """See ``BlockStore.expect_backed``."""
        self._store.expect_backed(blocks)


class LayersOfSlots:
    """See ``SlotMemory``: adjacent layers of the slots of another one.

    Args:
        slots: The other one.
        layers: Which.
    """

    def __init__(self, slots: SlotMemory, layers: range) -> None:
        self.layout = replace(slots.layout, num_layers=len(layers))
        self._slots, self._layers = slots, layers

    def part(self, first: int, count: int) -> torch.Tensor:
        """See ``SlotMemory.part``."""
        return self._slots.part(first, count)[:, self._layers.start : self._layers.stop]

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """See ``SlotMemory.addresses``."""
        return self._slots.addresses(slots) + np.uint64(self._layers.start * self.layout.layer_block_bytes)
