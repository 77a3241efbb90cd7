"""The KV of a member of a group: arenas of its kept layers, and of layers whose KV is leaving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page
from floodplain.memory.group_places import GroupPlaces, LayerPages
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.layer_tensors import LayerTensors
from floodplain.memory.runs import find_runs

_BLOCKS_PER_MOVE = 256
"""Blocks that one copy moves; bounds the copy's temporary."""


class GroupArena:
    """Blocks of one layer, by group block id, and their pages. Nothing is mapped at first. One thread at a time.

    The address range begins with ``first_quantum`` and has room for ``num_quanta``. ``pages`` are those behind each
    mapped group quantum.
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
        """Put pages behind group quanta that have none; at the limit on mappings ``UserError``, and nothing changed."""
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


class GroupKV:
    """Arenas by layer; pages come from the caller and return to it. One thread at a time.

    Attributes:
        arenas: Arenas of the kept layers, all with the same quanta.
        leaving: Arenas of other layers, until their KV is unmapped.
        layers: The kept layers for compute, looked up anew at each access.
        max_quanta: Group quanta that the kept layers have addresses for.
    """

    def __init__(self, device: Device, layout: KVLayout) -> None:
        self._device, self._layout = device, layout
        self.arenas: dict[int, GroupArena] = {}
        self.leaving: dict[int, GroupArena] = {}
        self.layers = GroupLayers(layout.num_layers, self.arenas)
        self.max_quanta = 0

    @property
    def quanta(self) -> tuple[int, ...]:
        """Quanta that have memory in the kept layers, ascending."""
        return tuple(sorted(min(self.arenas.items())[1].pages)) if self.arenas else ()

    @property
    def num_leaving_quanta(self) -> int:
        """Quanta of leaving layers, counted for each layer."""
        return sum(len(arena.pages) for arena in self.leaving.values())

    def find_held(self) -> LayerPages:
        """Pages of the kept layers, by layer and quantum."""
        return {layer: dict(arena.pages) for layer, arena in self.arenas.items()}

    def place(self, places: GroupPlaces, max_quanta: int, first_leaving: int) -> None:
        """Map pages in new arenas, then close the old ones. Until then other arenas may map the same pages, too.

        The kept layers get room for ``max_quanta``; leaving layers begin with group quantum ``first_leaving``.
        Everything is mapped before anything is unmapped, so at the system's limit on mappings (``UserError``) the old
        arenas stay.
        """
        num_leaving = max((len(quanta) for quanta in places.leaving.values()), default=0)
        with ExitStack() as on_failure:
            arenas = self._open(places.kept, max_quanta, 0, on_failure)
            leaving = self._open(places.leaving, num_leaving, first_leaving, on_failure)
            on_failure.pop_all()
        self.empty()
        self.arenas.update(arenas)
        self.leaving, self.max_quanta = leaving, max_quanta

    def grow(self, quanta: Sequence[int], pages: Sequence[Page]) -> None:
        """Put pages behind empty quanta of all kept layers, layer by layer.

        Raises ``UserError``, with nothing changed, at the system's limit on mappings.
        """
        rest, each = iter(pages), len(pages) // max(1, len(self.arenas) * len(quanta))
        with ExitStack() as on_failure:
            for arena in self.arenas.values():
                arena.map({quantum: [next(rest) for _ in range(each)] for quantum in quanta})
                on_failure.callback(arena.unmap, quanta)
            on_failure.pop_all()

    def shrink(self, moves: Sequence[tuple[int, int]], quanta: Sequence[int]) -> list[Page]:
        """Copy blocks (source, destination) in the kept layers, then unmap quanta; returns their pages."""
        blocks = [block for move in moves for block in move]
        if not all(arena.is_backed(blocks) for arena in self.arenas.values()):
            raise InvariantError("blocks of a group move that have no memory")
        if len({*blocks}) < len(blocks):
            raise InvariantError("a block is moved twice, or onto another that moves")
        for arena in self.arenas.values():
            arena.move_blocks(moves)
        unmapped = [arena.unmap(quanta) for arena in self.arenas.values()]
        return [page for each in unmapped for pages in each.values() for page in pages]

    def find(self, layer: int, blocks: Sequence[int]) -> GroupArena | None:
        """The arena with these blocks of a layer, kept or leaving; None if any has no memory here."""
        arena = self.arenas.get(layer) or self.leaving.get(layer)
        return arena if arena is not None and arena.is_backed(blocks) else None

    def empty_leaving(self) -> list[Page]:
        """Unmap and return the pages of leaving layers, and close their arenas."""
        pages = [page for arena in self.leaving.values() for page in arena.empty()]
        self.leaving = {}
        return pages

    def empty(self) -> list[Page]:
        """Unmap and return all pages, and close all arenas."""
        pages = [page for arena in self.arenas.values() for page in arena.empty()]
        self.arenas.clear()
        self.max_quanta = 0
        return pages + self.empty_leaving()

    def find_pages(self) -> list[Page]:
        """All pages that these arenas map."""
        arenas = [*self.arenas.values(), *self.leaving.values()]
        return [page for arena in arenas for pages in arena.pages.values() for page in pages]

    def _open(
        self, pages: LayerPages, num_quanta: int, first_quantum: int, on_failure: ExitStack
    ) -> dict[int, GroupArena]:
        arenas = {}
        for layer, quanta in pages.items():
            arenas[layer] = arena = GroupArena(self._device, self._layout, num_quanta, first_quantum)
            on_failure.callback(arena.empty)
            arena.map(quanta)
        return arenas


class GroupLayers(LayerTensors):
    """KV of the kept layers by the model's index, looked up anew at each access; other layers are refused."""

    def __init__(self, num_layers: int, arenas: Mapping[int, GroupArena]) -> None:
        self._num_layers = num_layers
        self._arenas = arenas

    def __len__(self) -> int:
        return self._num_layers

    def _tensor_of(self, layer: int) -> torch.Tensor:
        arena = self._arenas.get(layer)
        if arena is None:
            raise InvariantError(f"the KV of layer {layer} is with another member of the group")
        return arena.tensor
