"""The KV cache of one model on one device: one arena per layer, resized at iteration boundaries.

A block has a part in every layer, at the same place of each arena. Pages are unmapped whole, so blocks come and go by
the *quantum*: as many blocks as it takes for a layer's part to be whole pages. Holes between quanta are fine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.shrink import abort_shrink, commit_shrink, plan_shrink
from floodplain.memory.arena import Device, Page
from floodplain.memory.kv_layout import KVLayout

_BLOCKS_PER_MOVE = 256
"""Blocks that one copy inside the pool moves; bounds the copy's temporary."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What a shrink came to.

    Attributes:
        pages: The caller's now: to release to the device, or to map elsewhere.
        moved: Old block to new block; every block table must be rewritten before the next step.
        num_blocks: Blocks that the pool still has.
    """

    pages: list[Page]
    moved: dict[BlockId, BlockId]
    num_blocks: int


class KVPool:
    """Owner of the KV bytes. Nothing is mapped at first: ``grow`` it. One thread at a time, at a boundary.

    Args:
        device: Where the pages come from; it outlives the pool.
        layout: Shape of the cache.
        max_blocks: Most blocks ever; address space is reserved for them, rounded up to whole quanta.
    """

    def __init__(self, device: Device, layout: KVLayout, max_blocks: int) -> None:
        if layout.layer_block_bytes % 4:
            raise InvariantError(f"a layer's block of {layout.layer_block_bytes} bytes is not whole 32-bit words")
        self.device = device
        self.layout = layout
        self.quantum_blocks = layout.count_quantum_blocks(device.page_bytes)
        self.max_blocks = -(-max_blocks // self.quantum_blocks) * self.quantum_blocks
        self._backed = [0] * (self.max_blocks // self.quantum_blocks)  # quantum -> blocks with memory, from its first
        num_pages = self.max_blocks * layout.layer_block_bytes // device.page_bytes
        self._arenas = [device.reserve(num_pages) for _ in range(layout.num_layers)]
        shape = (self.max_blocks, *layout.block_shape)
        self.layers = tuple(arena.tensor(layout.dtype, shape) for arena in self._arenas)
        """One tensor per layer: [max_blocks, 2, block_tokens, num_kv_heads, head_dim]."""
        words = (self.max_blocks, layout.layer_block_words)
        self.words = tuple(arena.tensor(torch.int32, words) for arena in self._arenas)
        """The same bytes as 32-bit words: [max_blocks, layer_block_words]."""

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory."""
        return sum(self._backed)

    @property
    def quantum_bytes(self) -> int:
        """Bytes of a whole quantum over all layers."""
        return self.quantum_blocks * self.layout.block_bytes

    @property
    def num_mapped_pages(self) -> int:
        """Pages behind the pool, over all layers; those of a partial quantum may have room to spare."""
        return self.layout.num_layers * sum(self._count_pages(blocks) for blocks in self._backed)

    def count_pages(self, num_blocks: int) -> int:
        """Pages behind a pool that has so many blocks, over all layers, with one partial quantum at most."""
        whole, rest = divmod(num_blocks, self.quantum_blocks)
        return self.layout.num_layers * (whole * self._count_pages(self.quantum_blocks) + self._count_pages(rest))

    def is_backed(self, block: int) -> bool:
        """Whether a block has memory."""
        quantum, place = divmod(block, self.quantum_blocks)
        return 0 <= block < self.max_blocks and place < self._backed[quantum]

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Guard every copy: touching memory that is not there would end the process.

        Raises:
            InvariantError: A block has no memory.
        """
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

        Args:
            ledger: Of this pool; it gets the new blocks once they have memory.
            num_blocks: How many more; the last quantum may be partly backed.
            pages: ``count_growth_pages`` of them, of this device; None takes them from the device.

        Returns:
            The new blocks; None, with nothing changed, if the range or the device has no room.

        Raises:
            UserError: The system's limit on mappings is reached; nothing changed.
        """
        self._expect_own(ledger)
        growth = self._plan_growth(num_blocks)
        if growth is None:
            return None
        granted = self.device.allocate(self._count_new_pages(growth)) if pages is None else list(pages)
        if granted is None:
            return None
        self._map(growth, granted, is_ours=pages is None)
        new = [
            BlockId(quantum * self.quantum_blocks + place) for quantum, old, end in growth for place in range(old, end)
        ]
        ledger.add_memory(new)
        return new

    def map_quanta(self, quanta: Sequence[int], pages: Sequence[Page]) -> None:
        """Put pages behind whole quanta, layer by layer; the inverse of ``unmap_quanta``. No ledger is told.

        Raises:
            UserError: The system's limit on mappings is reached; nothing changed.
        """
        if any(self._backed[quantum] for quantum in quanta):
            raise InvariantError(f"quanta {list(quanta)} are not all empty")
        self._map([(quantum, 0, self.quantum_blocks) for quantum in quanta], list(pages), is_ours=False)

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
        """Copy blocks to others (source, destination) in all layers, on the device. No destination is a source."""
        sources, destinations = [s for s, _ in moves], [d for _, d in moves]
        self.expect_backed(sources + destinations)
        if len({*sources, *destinations}) < 2 * len(moves):
            raise InvariantError("a block is moved twice, or onto another that moves")
        for start in range(0, len(moves), _BLOCKS_PER_MOVE):
            part = slice(start, start + _BLOCKS_PER_MOVE)
            origin = torch.tensor(sources[part], device=self.device.torch_device)
            target = torch.tensor(destinations[part], device=self.device.torch_device)
            for words in self.words:
                words[target] = words[origin]

    def unmap_quanta(self, quanta: Sequence[int]) -> list[Page]:
        """Take the pages from behind these quanta, layer by layer in the order that ``map_quanta`` takes them."""
        pages = [
            page
            for arena in self._arenas
            for quantum in quanta
            for page in arena.unmap(self._first_page(quantum), self._count_pages(self._backed[quantum]))
        ]
        for quantum in quanta:
            self._backed[quantum] = 0
        return pages

    def close(self) -> None:
        """Release everything to the device. The tensors must not be used any more."""
        self.layers = self.words = ()
        self._backed = []
        for arena in self._arenas:
            arena.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect_own(self, ledger: BlockLedger) -> None:
        if ledger.quantum_blocks != self.quantum_blocks or ledger.num_blocks != self.num_blocks:
            raise InvariantError(
                f"the ledger has {ledger.num_blocks} blocks by {ledger.quantum_blocks},"
                f" the pool {self.num_blocks} by {self.quantum_blocks}"
            )

    def _first_page(self, quantum: int) -> int:
        return quantum * self._count_pages(self.quantum_blocks)

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

    def _count_new_pages(self, growth: list[tuple[int, int, int]]) -> int:
        per_layer = sum(self._count_pages(end) - self._count_pages(old) for _, old, end in growth)
        return per_layer * self.layout.num_layers

    def _map(self, growth: list[tuple[int, int, int]], pages: list[Page], *, is_ours: bool) -> None:
        """Put pages behind the growth of every layer, or of none: then pages that are ours go back to the device."""
        if len(pages) != self._count_new_pages(growth):
            raise InvariantError(f"{len(pages)} pages for {self._count_new_pages(growth)} places")
        places = [
            (arena, self._first_page(quantum) + self._count_pages(old), self._count_pages(end) - self._count_pages(old))
            for arena in self._arenas
            for quantum, old, end in growth
        ]
        num_mapped = position = 0
        try:
            for arena, first, count in places:
                arena.map(first, pages[position : position + count])
                num_mapped, position = num_mapped + 1, position + count
        except BaseException:
            for arena, first, count in places[:num_mapped]:
                arena.unmap(first, count)
            if is_ours:
                self.device.release(pages)
            raise
        for quantum, _, end in growth:
            self._backed[quantum] = end
