"""The KV cache of one model on one device: one arena per layer, resized at iteration boundaries.

A block has a part in every layer, at the same place of each arena. Only whole pages are unmapped, so the pool shrinks
by the *quantum*: as many blocks as make a layer's part whole pages. Holes between quanta are fine.

Layers can be unmapped and mapped again, too (``layer_arenas``): with fewer mapped, the same pages hold more blocks.
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
from floodplain.memory.arena import Device, Page
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.layer_arenas import LayerArenas


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of a shrink.

    Attributes:
        pages: Unmapped pages, which the caller releases to the device or maps elsewhere.
        moved: Old block to new; every block table must be rewritten before the next step.
        num_blocks: Blocks that the pool still has.
    """

    pages: list[Page]
    moved: dict[BlockId, BlockId]
    num_blocks: int


class KVPool:
    """Owner of the KV bytes. Nothing is mapped at first: ``grow`` it. One thread at a time, at a boundary.

    Address space for whole quanta of ``max_blocks``, also while layers are unmapped, is reserved.

    Attributes:
        layers: One tensor per layer, for compute: [max_blocks, 2, block_tokens, num_kv_heads, head_dim]. An unmapped
            layer raises ``InvariantError``.
        words: Where each layer's blocks are, for copies: int32 [max_blocks, layer_block_words]. Its arena, unless it
            was placed elsewhere. A new tuple when that changes: code that keeps addresses reads them anew.
    """

    def __init__(self, device: Device, layout: KVLayout, max_blocks: int) -> None:
        if layout.layer_block_bytes % 4:
            raise InvariantError(f"a layer's block of {layout.layer_block_bytes} bytes is not whole 32-bit words")
        self.device, self.layout = device, layout
        self.quantum_blocks = layout.count_quantum_blocks(device.page_bytes)
        self.max_blocks = -(-max_blocks // self.quantum_blocks) * self.quantum_blocks
        self._backed = [0] * (self.max_blocks // self.quantum_blocks)  # quantum -> blocks with memory, from its first
        self._arenas = LayerArenas(device, layout, self.max_blocks)
        self.layers, self.words = self._arenas.layers, self._arenas.words

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory."""
        return sum(self._backed)

    @property
    def quanta(self) -> tuple[int, ...]:
        """Quanta that have memory, ascending: the order of ``Shrunk.pages`` when no block is in use and all go."""
        return tuple(quantum for quantum, blocks in enumerate(self._backed) if blocks)

    @property
    def mapped_layers(self) -> tuple[int, ...]:
        """The layers that have pages, all behind the same blocks; at first all."""
        return self._arenas.mapped

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
        """Raise ``InvariantError`` unless all layers of blocks have memory here: copying from none is a crash."""
        nowhere = self._arenas.nowhere
        if nowhere:
            raise InvariantError(f"layers {nowhere} of the KV pool are with another engine")
        self._expect_backed(blocks)

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
        self._map(growth, granted, is_ours=pages is None)
        runs = self._find_runs(growth)
        for run in runs:
            ledger.add_memory(run)
        return cast("list[BlockId]", list(chain.from_iterable(runs)))

    # -- layers ----------------------------------------------------------------------------------------------------

    def unmap_layers(self, layers: Sequence[int]) -> list[Page]:
        """Take all pages from behind mapped layers, ``num_layer_pages`` each; one layer at least stays mapped.

        A layer that is not placed elsewhere by then counts as held by another engine: no block can be copied to a slot
        until that layer is mapped again. No copy may be in flight.
        """
        return self._arenas.unmap_layers(layers, self._backed_places())

    def map_layers(self, layers: Sequence[int], pages: Sequence[Page]) -> None:
        """Put pages, ``num_layer_pages`` for each, behind all blocks of unmapped layers.

        The caller fills all blocks in use, and cached blocks unless it drops them.
        """
        self._arenas.map_layers(layers, self._backed_places(), pages)

    def place_layer(self, layer: int, words: torch.Tensor | None) -> None:
        """Set where a layer's blocks are from now on; the caller has copied them. No copy may be in flight.

        ``words`` are int32 [max_blocks, layer_block_words], page-locked beside a GPU; None for the layer's arena.
        """
        self._arenas.place(layer, words)
        self.words = self._arenas.words

    # -- shrinking -------------------------------------------------------------------------------------------------

    def shrink(self, ledger: BlockLedger, target_blocks: int) -> Shrunk:
        """Shrink to the fewest quanta that hold ``target_blocks`` and all used blocks: prepare, copy, commit or abort.

        Blocks in use move out of the emptiest quanta, cached ones there are dropped, and quanta that a copy in flight
        touches stay.
        """
        self._expect_own(ledger)
        plan = plan_shrink(ledger, target_blocks)
        try:
            self.move_blocks(plan.moves)
        except BaseException:
            abort_shrink(ledger, plan)
            raise
        moved = commit_shrink(ledger, plan)
        return Shrunk(self.unmap_quanta(plan.quanta), moved, self.num_blocks)

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to others (source, destination) in all layers that are here. No destination is a source."""
        sources, destinations = [s for s, _ in moves], [d for _, d in moves]
        self._expect_backed(sources + destinations)
        if len({*sources, *destinations}) < 2 * len(moves):
            raise InvariantError("a block is moved twice, or onto another that moves")
        self._arenas.move_blocks(sources, destinations)

    def unmap_quanta(self, quanta: Sequence[int]) -> list[Page]:
        """Take the pages from behind these quanta, layer by layer in the order that ``grow`` takes them."""
        pages = self._arenas.unmap([self._place(quantum, 0, self._backed[quantum]) for quantum in quanta])
        for quantum in quanta:
            self._backed[quantum] = 0
        return pages

    def discard_quanta(self, quanta: Sequence[int]) -> bool:
        """Return the memory of quanta without used blocks to the system until written; True if any was returned."""
        return self._arenas.discard([self._place(quantum, 0, self._backed[quantum]) for quantum in quanta])

    def close(self) -> None:
        """Release everything to the device. The tensors must not be used any more."""
        self.words, self._backed = (), []
        self._arenas.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect_own(self, ledger: BlockLedger) -> None:
        if ledger.quantum_blocks != self.quantum_blocks or ledger.num_blocks != self.num_blocks:
            raise InvariantError(
                f"the ledger has {ledger.num_blocks} blocks by {ledger.quantum_blocks},"
                f" the pool {self.num_blocks} by {self.quantum_blocks}"
            )

    def _expect_backed(self, blocks: Iterable[int]) -> None:
        absent = [block for block in blocks if not self.is_backed(block)]
        if absent:
            raise InvariantError(f"blocks {absent[:8]} of the KV pool have no memory")

    def _backed_places(self) -> list[tuple[int, int]]:
        return [self._place(quantum, 0, blocks) for quantum, blocks in enumerate(self._backed) if blocks]

    def _place(self, quantum: int, begin: int, end: int) -> tuple[int, int]:
        """(first page, number) in each arena of what a quantum takes when it grows from ``begin`` to ``end`` blocks."""
        first, before = quantum * self._count_pages(self.quantum_blocks), self._count_pages(begin)
        return first + before, self._count_pages(end) - before

    def _count_pages(self, num_blocks: int) -> int:
        """Pages of one layer behind the first blocks of a quantum."""
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

    def _map(self, growth: list[tuple[int, int, int]], pages: list[Page], *, is_ours: bool) -> None:
        """Map pages behind the growth of every mapped layer. On an error map none, and release our own pages."""
        try:
            self._arenas.map([self._place(*one) for one in growth], pages)
        except BaseException:
            if is_ours:
                self.device.release(pages)
            raise
        for quantum, _, end in growth:
            self._backed[quantum] = end
