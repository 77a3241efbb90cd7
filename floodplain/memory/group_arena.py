"""One layer's KV while its instance is in a group: an arena, and the pages behind each of its quanta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.runs import find_runs

_BLOCKS_PER_MOVE = 256
"""Blocks that one copy moves; bounds the copy's temporary."""


class GroupArena:
    """Blocks of one layer, by group block id. Nothing is mapped at first. One thread at a time.

    Args:
        device: Where the pages come from.
        layout: Shape of the cache.
        num_quanta: Quanta that the address range has room for.
        first_quantum: Group quantum that lies at the start of the range.

    Attributes:
        pages: Pages behind each mapped quantum, by group quantum.
    """

    def __init__(self, device: Device, layout: KVLayout, num_quanta: int, first_quantum: int = 0) -> None:
        self._quantum_blocks = layout.count_quantum_blocks(device.page_bytes)
        self._quantum_pages = self._quantum_blocks * layout.layer_block_bytes // device.page_bytes
        self._first_quantum = first_quantum
        self._layout, self._num_blocks = layout, num_quanta * self._quantum_blocks
        self._arena = device.reserve(num_quanta * self._quantum_pages)
        self.pages: dict[int, list[Page]] = {}

    @cached_property
    def tensor(self) -> torch.Tensor:
        """For compute: [num_blocks, 2, block_tokens, num_kv_heads, head_dim], from ``first_quantum`` on."""
        return self._arena.tensor(self._layout.dtype, (self._num_blocks, *self._layout.block_shape))

    @cached_property
    def _words(self) -> torch.Tensor:
        """For copies: int32 [num_blocks, layer_block_words]."""
        return self._arena.tensor(torch.int32, (self._num_blocks, self._layout.layer_block_words))

    def map(self, pages: Mapping[int, Sequence[Page]]) -> None:
        """Put pages behind group quanta that have none.

        Raises:
            UserError: The system's limit on mappings is reached; nothing changed.
        """
        mapped: list[tuple[int, int]] = []
        try:
            for first, count in find_runs(sorted(pages)):
                run = [page for quantum in range(first, first + count) for page in pages[quantum]]
                if len(run) != count * self._quantum_pages:
                    raise InvariantError(f"{len(run)} pages for {count} quanta of {self._quantum_pages}")
                self._arena.map(self._place(first), run)
                mapped.append((first, count))
        except BaseException:
            for first, count in mapped:
                self._arena.unmap(self._place(first), count * self._quantum_pages)
            raise
        self.pages.update({quantum: list(each) for quantum, each in pages.items()})
        if pages:
            _ = self.tensor, self._words  # a GPU's tensors are made while pages are there, and stay

    def unmap(self, quanta: Sequence[int]) -> dict[int, list[Page]]:
        """Take the pages from behind group quanta; they keep their bytes."""
        absent = [quantum for quantum in quanta if quantum not in self.pages]
        if absent:
            raise InvariantError(f"group quanta {absent[:8]} have no memory")
        for first, count in find_runs(sorted(quanta)):
            found = self._arena.unmap(self._place(first), count * self._quantum_pages)
            if found != [page for quantum in range(first, first + count) for page in self.pages[quantum]]:
                raise InvariantError(f"group quanta {first}+{count} have other pages than the books say")
        return {quantum: self.pages.pop(quantum) for quantum in quanta}

    def is_backed(self, blocks: Sequence[int]) -> bool:
        """Whether all of these group blocks have memory."""
        return all(block // self._quantum_blocks in self.pages for block in blocks)

    def read(self, blocks: Sequence[int]) -> np.ndarray:
        """A copy of backed blocks: uint8 [n, layer_block_bytes]."""
        if not blocks:
            return np.empty((0, self._layout.layer_block_bytes), dtype=np.uint8)
        rows = self._rows(blocks)
        if self._words.is_cpu:
            words: np.ndarray = self._words.numpy()[rows]
        else:
            words = self._words[torch.from_numpy(rows).to(self._words.device)].cpu().numpy()
        return words.view(np.uint8)

    def write(self, blocks: Sequence[int], data: np.ndarray) -> None:
        """Write backed blocks from uint8 [n, layer_block_bytes]."""
        if data.dtype != np.uint8 or data.shape != (len(blocks), self._layout.layer_block_bytes):
            raise InvariantError(
                f"{data.dtype} {data.shape} for {len(blocks)} blocks of {self._layout.layer_block_bytes}"
            )
        if not blocks:
            return
        rows, words = self._rows(blocks), np.ascontiguousarray(data).view(np.int32)
        if self._words.is_cpu:
            self._words.numpy()[rows] = words
        else:
            device = self._words.device
            self._words[torch.from_numpy(rows).to(device)] = torch.tensor(words, device=device)

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to others, pair by pair: (source, destination). No destination is a source."""
        for start in range(0, len(moves), _BLOCKS_PER_MOVE):
            rows = self._rows([block for move in moves[start : start + _BLOCKS_PER_MOVE] for block in move])
            source, target = torch.from_numpy(rows.reshape(-1, 2).T.copy()).to(self._words.device)
            self._words[target] = self._words[source]

    def empty(self) -> list[Page]:
        """Unmap and return all pages, and release the range; no tensor over it is used any more."""
        taken = self.unmap(list(self.pages))
        self._arena.close()
        return [page for pages in taken.values() for page in pages]

    def _place(self, quantum: int) -> int:
        return (quantum - self._first_quantum) * self._quantum_pages

    def _rows(self, blocks: Sequence[int]) -> np.ndarray:
        return np.array(blocks, dtype=np.int64) - self._first_quantum * self._quantum_blocks
