"""The KV cache of one model on one device: one arena per layer, resized at iteration boundaries.

A block has a part in every layer, at the same place of each arena. The pool shrinks by the *quantum*: as many blocks as
make a layer's part whole pages. Holes between quanta are fine. With fewer layers *mapped*, the same pages hold more
blocks. A layer's blocks are in its arena, or *placed* elsewhere under the same ids, such as in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.shrink import abort_shrink, commit_shrink, plan_shrink
from floodplain.memory.arena import Arena, Device, Page
from floodplain.memory.kv_layout import KVLayout, LayerTensors, move_blocks

Places = Sequence[tuple[int, int]]
"""(first page, number of pages) of stretches, the same in each arena."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Unmapped ``pages``, now the caller's, and blocks ``moved``, old to new, to be put into all block tables."""

    pages: list[Page]
    moved: dict[BlockId, BlockId]


class KVPool:
    """Owner of the KV bytes. Nothing is mapped at first: ``grow`` it. One thread at a time, at a boundary.

    Address space for whole quanta of ``max_blocks`` is reserved.

    Attributes:
        mapped_layers: The layers that have pages, in order, all behind the same blocks; at first all.
        layers: One tensor per layer, for compute: [max_blocks, 2, block_tokens, num_kv_heads, head_dim].
        words: Where each layer's blocks are, for copies: int32 [max_blocks, layer_block_words]; a new tuple when that
            changes.
    """

    def __init__(self, device: Device, layout: KVLayout, max_blocks: int) -> None:
        if layout.layer_block_bytes % 4:
            raise InvariantError(f"a layer's block of {layout.layer_block_bytes} bytes is not whole 32-bit words")
        self.device, self.layout = device, layout
        self.quantum_blocks = layout.count_quantum_blocks(device.page_bytes)
        self.max_blocks = -(-max_blocks // self.quantum_blocks) * self.quantum_blocks
        self._backed = [0] * (self.max_blocks // self.quantum_blocks)  # quantum -> blocks with memory, from its first
        num_pages = self.max_blocks * layout.layer_block_bytes // device.page_bytes
        self._arenas: list[Arena] = [device.reserve(num_pages) for _ in range(layout.num_layers)]
        shape, words = (self.max_blocks, *layout.block_shape), (self.max_blocks, layout.layer_block_words)
        self.words = self._own_words = tuple(arena.tensor(torch.int32, words) for arena in self._arenas)
        self._placed: dict[int, torch.Tensor] = {}
        self._set_mapped(range(layout.num_layers))
        self._tensors = [arena.tensor(layout.dtype, shape) for arena in self._arenas]
        self.layers = LayerTensors(layout.num_layers, self._tensor_of)

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory."""
        return sum(self._backed)

    @property
    def quanta(self) -> tuple[int, ...]:
        """Quanta that have memory, ascending: the order of ``Shrunk.pages`` when no block is in use and all go."""
        return tuple(quantum for quantum, blocks in enumerate(self._backed) if blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes of this device: its mapped layers. In swap space it has ``layout.block_bytes``."""
        return len(self.mapped_layers) * self.layout.layer_block_bytes

    @property
    def quantum_bytes(self) -> int:
        """Bytes of a whole quantum over all mapped layers."""
        return self.quantum_blocks * self.block_bytes

    @property
    def num_layer_pages(self) -> int:
        """Pages behind each mapped layer; those of a partial quantum may have room to spare."""
        return sum(self._count_pages(blocks) for blocks in self._backed)

    @property
    def num_mapped_pages(self) -> int:
        """Pages behind the pool, over all mapped layers."""
        return len(self.mapped_layers) * self.num_layer_pages

    def count_pages(self, num_blocks: int) -> int:
        """Pages behind a pool that has so many blocks, over all mapped layers, with one partial quantum at most."""
        whole, rest = divmod(num_blocks, self.quantum_blocks)
        return len(self.mapped_layers) * (whole * self._count_pages(self.quantum_blocks) + self._count_pages(rest))

    def is_backed(self, block: int) -> bool:
        """Whether a block has memory."""
        quantum, place = divmod(block, self.quantum_blocks)
        return 0 <= block < self.max_blocks and place < self._backed[quantum]

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Raise ``InvariantError`` unless all blocks have memory: copying from none is a crash."""
        absent = [block for block in blocks if not self.is_backed(block)]
        if absent:
            raise InvariantError(f"blocks {absent[:8]} of the KV pool have no memory")

    # -- growing ---------------------------------------------------------------------------------------------------

    def count_growth_pages(self, num_blocks: int) -> int | None:
        """Pages that ``grow`` by ``num_blocks`` takes; None if the reserved range has no room for them."""
        growth = self._plan_growth(num_blocks)
        return None if growth is None else self._count_new_pages(growth)

    def grow(self, ledger: BlockLedger, num_blocks: int, pages: Sequence[Page] | None = None) -> list[BlockId] | None:
        """Give the ledger ``num_blocks`` more blocks: a partial quantum is completed first, then the lowest are filled.

        ``pages`` are ``count_growth_pages`` of this device; None takes them from it. Returns the new blocks; None, with
        nothing changed, if range or device have no room.
        """
        self._expect_own(ledger)
        growth = self._plan_growth(num_blocks)
        if growth is None:
            return None
        granted = self.device.allocate(self._count_new_pages(growth)) if pages is None else list(pages)
        if granted is None:
            return None
        try:
            self._map(self.mapped_layers, [self._place(*one) for one in growth], granted)
        except BaseException:
            if pages is None:
                self.device.release(granted)
            raise
        for quantum, _, end in growth:
            self._backed[quantum] = end
        runs = self._find_runs(growth)
        for run in runs:
            ledger.add_memory(run)
        return cast("list[BlockId]", list(chain.from_iterable(runs)))

    # -- layers ----------------------------------------------------------------------------------------------------

    def unmap_layers(self, layers: Sequence[int]) -> list[Page]:
        """Take the pages, ``num_layer_pages`` each, of layers that are placed elsewhere; one layer stays mapped."""
        left = {*self.mapped_layers} - {*layers}
        if len(left) + len(layers) != len(self.mapped_layers) or not left:
            mapped = list(self.mapped_layers)
            raise InvariantError(f"layers {list(layers)} of the mapped {mapped} cannot go: one must stay")
        if not self._placed.keys() >= {*layers}:
            raise InvariantError(f"layers {list(layers)} cannot go: the blocks of some are nowhere else")
        pages = self._unmap(layers, self._backed_places())
        self._set_mapped(left)
        return pages

    def map_layers(self, layers: Sequence[int], pages: Sequence[Page]) -> None:
        """Put ``num_layer_pages`` pages for each behind all blocks of unmapped layers, for the caller to fill."""
        if len({*layers} - {*self.mapped_layers}) < len(layers):
            raise InvariantError(f"layers {list(layers)} are not all unmapped")
        self._map(layers, self._backed_places(), pages)
        self._set_mapped({*self.mapped_layers, *layers})

    def place_layer(self, layer: int, words: torch.Tensor | None) -> None:
        """Set where a layer's blocks are from now on; the caller has copied them. No copy may be in flight.

        ``words`` are int32 [max_blocks, layer_block_words], page-locked beside a GPU; None for the layer's arena.
        """
        own = self._own_words[layer]
        if words is None and layer not in self.mapped_layers:
            raise InvariantError(f"blocks of layer {layer} are to be in its arena, which is unmapped")
        if words is None:
            self._placed.pop(layer, None)
        elif words.shape != own.shape or words.dtype != own.dtype or not words.is_contiguous():
            raise InvariantError(f"blocks of shape {tuple(words.shape)} are not a layer's: {tuple(own.shape)}")
        elif words.device != own.device and not words.is_pinned():
            raise InvariantError("blocks beside a GPU must be page-locked")
        else:
            self._placed[layer] = words
        self.words = tuple(self._placed.get(index, words) for index, words in enumerate(self._own_words))

    # -- shrinking -------------------------------------------------------------------------------------------------

    def shrink(self, ledger: BlockLedger, target_blocks: int) -> Shrunk:
        """Shrink to the fewest quanta that hold ``target_blocks`` and all used blocks, which move into these.

        Cached blocks in the other quanta are dropped. Quanta that a copy in flight touches stay.
        """
        self._expect_own(ledger)
        plan = plan_shrink(ledger, target_blocks)
        try:
            self.move_blocks(plan.moves)
        except BaseException:
            abort_shrink(ledger, plan)
            raise
        moved = commit_shrink(ledger, plan)
        return Shrunk(self.unmap_quanta(plan.quanta), moved)

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to others (source, destination) in all layers. No destination is a source."""
        self.expect_backed(block for move in moves for block in move)
        move_blocks(self.words, moves)

    def unmap_quanta(self, quanta: Sequence[int]) -> list[Page]:
        """Take the pages from behind these quanta, layer by layer in the order that ``grow`` takes them."""
        pages = self._unmap(self.mapped_layers, [self._place(quantum, 0, self._backed[quantum]) for quantum in quanta])
        for quantum in quanta:
            self._backed[quantum] = 0
        return pages

    def discard_quanta(self, quanta: Sequence[int]) -> bool:
        """Return the memory of unused quanta of layers in their arenas until written; True if any was returned."""
        places = _join([self._place(quantum, 0, self._backed[quantum]) for quantum in quanta])
        arenas = [self._arenas[layer] for layer in self.mapped_layers if layer not in self._placed]
        return sum(arena.discard(first, count) for arena in arenas for first, count in places) > 0

    def close(self) -> None:
        """Release everything to the device. The tensors must not be used any more."""
        self._tensors = []
        self.words = self._own_words = ()
        self._backed = []
        self._placed.clear()
        for arena in self._arenas:
            arena.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect_own(self, ledger: BlockLedger) -> None:
        if ledger.quantum_blocks != self.quantum_blocks or ledger.num_blocks != self.num_blocks:
            raise InvariantError(
                f"the ledger has {ledger.num_blocks} blocks by {ledger.quantum_blocks},"
                f" the pool {self.num_blocks} by {self.quantum_blocks}"
            )

    def _backed_places(self) -> list[tuple[int, int]]:
        return [self._place(quantum, 0, blocks) for quantum, blocks in enumerate(self._backed) if blocks]

    def _place(self, quantum: int, begin: int, end: int) -> tuple[int, int]:
        """(first page, number) in each arena of what a quantum takes when it grows from ``begin`` to ``end`` blocks."""
        first, before = quantum * self._count_pages(self.quantum_blocks), self._count_pages(begin)
        return first + before, self._count_pages(end) - before

    def _count_pages(self, num_blocks: int) -> int:
        return -(-num_blocks * self.layout.layer_block_bytes // self.device.page_bytes)

    def _plan_growth(self, num_blocks: int) -> list[tuple[int, int, int]] | None:
        """Which quanta grow: (quantum, blocks before, blocks after), partial ones first; None if there is no room."""
        order = sorted(range(len(self._backed)), key=lambda quantum: (not self._backed[quantum], quantum))
        growth = []
        for quantum in order:
            if num_blocks == 0:
                break
            old = self._backed[quantum]
            end = min(old + num_blocks, self.quantum_blocks)
            if end > old:
                growth.append((quantum, old, end))
                num_blocks -= end - old
        return None if num_blocks else growth

    def _find_runs(self, growth: list[tuple[int, int, int]]) -> list[range]:
        """The new blocks, in order; adjacent whole quanta are one run."""
        runs = [range(0)]
        for quantum, old, end in growth:
            first = quantum * self.quantum_blocks
            start = runs.pop().start if runs[-1].stop == first + old else first + old
            runs.append(range(start, first + end))
        return runs

    def _count_new_pages(self, growth: list[tuple[int, int, int]]) -> int:
        return len(self.mapped_layers) * sum(self._place(*one)[1] for one in growth)

    def _set_mapped(self, layers: Iterable[int]) -> None:
        self.mapped_layers = tuple(sorted(layers))
        self._mapped = frozenset(layers)  # looked up for each layer of each step

    def _tensor_of(self, layer: int) -> torch.Tensor:
        if layer not in self._mapped:
            raise InvariantError(f"the KV of layer {layer} is not mapped")
        return self._tensors[layer]

    def _map(self, layers: Sequence[int], places: Places, pages: Sequence[Page]) -> None:
        """Map pages behind the places of each layer, layer by layer, or behind none."""
        joined = _join(places)
        wanted = len(layers) * sum(count for _, count in joined)
        if len(pages) != wanted:
            raise InvariantError(f"{len(pages)} pages for {wanted} places")
        position, mapped = 0, []
        try:
            for arena in [self._arenas[layer] for layer in layers]:
                for first, count in joined:
                    arena.map(first, pages[position : position + count])
                    mapped.append((arena, first, count))
                    position += count
        except BaseException:
            for arena, first, count in mapped:
                arena.unmap(first, count)
            raise

    def _unmap(self, layers: Sequence[int], places: Places) -> list[Page]:
        """Take the pages from behind the places of each layer, in the order in which ``_map`` takes them."""
        joined = _join(places)
        return [page for layer in layers for first, count in joined for page in self._arenas[layer].unmap(first, count)]


def _join(places: Places) -> Places:
    """Merge stretches that follow each other, in the same order: a system call for each would be slow."""
    joined: list[tuple[int, int]] = []
    for first, count in places:
        start = joined.pop()[0] if joined and sum(joined[-1]) == first else first
        joined.append((start, first + count - start))
    return joined
