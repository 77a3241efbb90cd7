"""One arena per layer of a KV cache. A layer is *mapped* while its arena has pages, at the same places in each arena.

A layer's blocks are in its arena, or *placed* elsewhere under the same ids, such as in a copy in the host's memory (the
arena may then be unmapped, or serve other layers). Blocks of an unmapped layer that is not placed are with another
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Arena, Device, Page
from floodplain.memory.kv_layout import KVLayout, LayerTensors

_BLOCKS_PER_MOVE = 256
"""Blocks that one copy inside the pool moves; bounds the copy's temporary."""

Places = Sequence[tuple[int, int]]
"""(first page, number of pages) of stretches, the same in each arena."""


class LayerArenas:
    """The arenas, which of them are mapped, and where blocks are. At first all count as mapped, without a page.

    ``max_blocks`` are whole pages.

    Attributes:
        mapped: The mapped layers, in order.
        layers: The arenas' tensors, [max_blocks, 2, block_tokens, num_kv_heads, head_dim] each. An unmapped layer
            raises ``InvariantError``, since touching its tensor would crash the process.
        words: Where each layer's blocks are, int32 [max_blocks, layer_block_words]. A new tuple when that changes.
    """

    def __init__(self, device: Device, layout: KVLayout, max_blocks: int) -> None:
        num_pages = max_blocks * layout.layer_block_bytes // device.page_bytes
        self._arenas: list[Arena] = [device.reserve(num_pages) for _ in range(layout.num_layers)]
        shape, words = (max_blocks, *layout.block_shape), (max_blocks, layout.layer_block_words)
        self._own_words = tuple(arena.tensor(torch.int32, words) for arena in self._arenas)
        self._placed: dict[int, torch.Tensor] = {}
        self.mapped: tuple[int, ...] = tuple(range(layout.num_layers))
        self.layers = _Tensors([arena.tensor(layout.dtype, shape) for arena in self._arenas])
        self.words = self._own_words

    @property
    def nowhere(self) -> list[int]:
        """Layers whose blocks are with another engine."""
        return sorted({*range(len(self._arenas))} - {*self.mapped, *self._placed})

    def place(self, layer: int, words: torch.Tensor | None) -> None:
        """Set where a layer's blocks are from now on; None: in its arena."""
        own = self._own_words[layer]
        if words is None:
            self._placed.pop(layer, None)
        elif words.shape != own.shape or words.dtype != own.dtype or not words.is_contiguous():
            raise InvariantError(f"blocks of shape {tuple(words.shape)} are not a layer's: {tuple(own.shape)}")
        elif words.device != own.device and not words.is_pinned():
            raise InvariantError("blocks beside a GPU must be page-locked")
        else:
            self._placed[layer] = words
        self.words = tuple(self._placed.get(index, words) for index, words in enumerate(self._own_words))

    def map_layers(self, layers: Sequence[int], places: Places, pages: Sequence[Page]) -> None:
        """Map pages behind these places of unmapped layers, which then are mapped; otherwise as ``map``."""
        if len({*layers} - {*self.mapped}) < len(layers):
            raise InvariantError(f"layers {list(layers)} are not all unmapped")
        self._map([self._arenas[layer] for layer in layers], places, pages)
        self._set_mapped({*self.mapped, *layers})

    def unmap_layers(self, layers: Sequence[int], places: Places) -> list[Page]:
        """Unmap all pages of some mapped layers and return them; one layer at least stays mapped."""
        left = {*self.mapped} - {*layers}
        if len(left) + len(layers) != len(self.mapped) or not left:
            raise InvariantError(f"layers {list(layers)} of the mapped {list(self.mapped)} cannot go: one must stay")
        pages = _unmap([self._arenas[layer] for layer in layers], places)
        self._set_mapped(left)
        return pages

    def map(self, places: Places, pages: Sequence[Page]) -> None:
        """Put pages behind these places of every mapped layer, layer by layer."""
        self._map(self._mapped_arenas(), places, pages)

    def unmap(self, places: Places) -> list[Page]:
        """Take the pages from behind these places of every mapped layer, in the order in which ``map`` takes them."""
        return _unmap(self._mapped_arenas(), places)

    def discard(self, places: Places) -> bool:
        """Return the memory behind these places, but of placed layers, until written; True if any was returned."""
        arenas = [self._arenas[layer] for layer in self.mapped if layer not in self._placed]
        return sum(arena.discard(first, count) for arena in arenas for first, count in _join(places)) > 0

    def move_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks to others, pair by pair, in all layers but those with another engine."""
        gone = self.nowhere
        here = [words for layer, words in enumerate(self.words) if layer not in gone]
        for start in range(0, len(sources), _BLOCKS_PER_MOVE):
            part = slice(start, start + _BLOCKS_PER_MOVE)
            for device, on_device in groupby(here, lambda words: words.device):
                origin = torch.tensor(sources[part], device=device)
                target = torch.tensor(destinations[part], device=device)
                for words in on_device:
                    words[target] = words[origin]

    def close(self) -> None:
        """Release all pages to the device. The tensors must not be used any more."""
        self.layers.clear()
        self.words = self._own_words = ()
        self._placed.clear()
        for arena in self._arenas:
            arena.close()

    def _mapped_arenas(self) -> list[Arena]:
        return [self._arenas[layer] for layer in self.mapped]

    def _set_mapped(self, layers: set[int]) -> None:
        self.mapped = tuple(sorted(layers))
        self.layers.set_readable(layers)

    @staticmethod
    def _map(arenas: Sequence[Arena], places: Places, pages: Sequence[Page]) -> None:
        joined = _join(places)
        wanted = len(arenas) * sum(count for _, count in joined)
        if len(pages) != wanted:
            raise InvariantError(f"{len(pages)} pages for {wanted} places")
        position, mapped = 0, []
        try:
            for arena in arenas:
                for first, count in joined:
                    arena.map(first, pages[position : position + count])
                    mapped.append((arena, first, count))
                    position += count
        except BaseException:
            for arena, first, count in mapped:
                arena.unmap(first, count)
            raise


def _unmap(arenas: Sequence[Arena], places: Places) -> list[Page]:
    joined = _join(places)
    return [page for arena in arenas for first, count in joined for page in arena.unmap(first, count)]


def _join(places: Places) -> Places:
    """Merge stretches that follow each other, in the same order: a system call for each would be slow."""
    joined: list[tuple[int, int]] = []
    for first, count in places:
        start = joined.pop()[0] if joined and sum(joined[-1]) == first else first
        joined.append((start, first + count - start))
    return joined


class _Tensors(LayerTensors):
    """One tensor per layer; each access checks anew that the layer is mapped."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._readable = set(range(len(tensors)))

    def set_readable(self, indices: set[int]) -> None:
        """Set the layers that may be accessed; all others are refused from now on."""
        self._readable = set(indices)

    def clear(self) -> None:
        """Drop all tensors."""
        self._tensors = []

    def _tensor_of(self, layer: int) -> torch.Tensor:
        if layer not in self._readable:
            raise InvariantError(f"the KV of layer {layer} is not mapped")
        return self._tensors[layer]

    def __len__(self) -> int:
        return len(self._tensors)
