"""Pages of one instance while it is in a group: it keeps fewer layers, so its KV pool has more blocks.

Pages of the other layers' parameters and KV are mapped behind more blocks of the *kept* layers. Pages of used blocks
are mapped at another address under group block ids: no byte is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page
from floodplain.memory.group_places import GroupPlaces, LayerPages, expect_group, place_pages, sort_pages
from floodplain.memory.kv_layout import KVLayout, LayerTensors, move_blocks, read_blocks, write_blocks
from floodplain.memory.paged_buffer import DroppedParameters, PagedBuffer
from floodplain.memory.runs import find_runs


class GroupArena:
    """Blocks of one layer, by group block id, and their pages. Nothing is mapped at first. One thread at a time.

    It has addresses for ``num_quanta`` from ``first_quantum`` on; ``pages`` are those behind each mapped quantum.
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
    def words(self) -> torch.Tensor:
        """For copies: int32 [num_blocks, layer_block_words]."""
        return self._arena.tensor(torch.int32, (self._num_blocks, self._layout.layer_block_words))

    def map(self, pages: Mapping[int, Sequence[Page]]) -> None:
        """Put pages behind group quanta that have none."""
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
            _ = self.tensor, self.words  # a GPU's tensors are made while pages are there, and stay

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
        return read_blocks(self.words, self._rows(blocks))

    def write(self, blocks: Sequence[int], data: np.ndarray) -> None:
        """Write backed blocks from uint8 [n, layer_block_bytes]."""
        if blocks:
            write_blocks(self.words, self._rows(blocks), data)

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
        self.layers = LayerTensors(layout.num_layers, self._tensor_of)
        self.max_quanta = 0

    @property
    def quanta(self) -> tuple[int, ...]:
        """Quanta that have memory in the kept layers, ascending."""
        return tuple(sorted(min(self.arenas.items())[1].pages)) if self.arenas else ()

    def place(self, places: GroupPlaces, max_quanta: int, first_leaving: int) -> None:
        """Map pages in new arenas, then close the old ones, which stay if that fails. Both may map a page meanwhile.

        The kept layers get room for ``max_quanta``; leaving layers begin with group quantum ``first_leaving``.
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
        """Put pages behind empty quanta of all kept layers, layer by layer."""
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
        if moves:
            move_blocks([arena.words for arena in self.arenas.values()], moves)
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

    def _tensor_of(self, layer: int) -> torch.Tensor:
        arena = self.arenas.get(layer)
        if arena is None:
            raise InvariantError(f"the KV of layer {layer} is with another member of the group")
        return arena.tensor


class GroupMemory:
    """Owner of one member's pages between ``drop`` and ``close_group`` or ``abandon``; empty before and after.

    A group block ``b`` is block ``b % Q`` of group quantum ``b // Q``, with Q = ``quantum_blocks``. All ids below are
    group ids, except ``quanta`` and ``used`` of ``drop``.

    Threads: every call takes one lock, and compute uses ``layers`` without it. Beside compute may run: ``read``,
    ``write`` of blocks that no step uses, ``settle``, ``grow``, ``map_parameters``, ``take_spare``. The rest only at a
    boundary, with no kernel running.

    Attributes:
        quantum_pages: Pages of one layer's quantum.
        kept: The layers that this member computes; empty without a group.
        layers: KV of the kept layers by the model's index, for compute; others raise ``InvariantError``.
    """

    def __init__(self, device: Device, layout: KVLayout, layer_buffers: Sequence[PagedBuffer]) -> None:
        if len(layer_buffers) != layout.num_layers:
            raise InvariantError(f"{len(layer_buffers)} parameter buffers for {layout.num_layers} layers")
        self.quantum_blocks = layout.count_quantum_blocks(device.page_bytes)
        self.quantum_pages = self.quantum_blocks * layout.layer_block_bytes // device.page_bytes
        self.kept = range(0)
        self._num_layers = layout.num_layers
        self._kv = GroupKV(device, layout)
        self._parameters = DroppedParameters(layer_buffers)
        self._lock = threading.RLock()
        self._free: list[Page] = []
        self._owned: set[Page] = set()
        self.layers = self._kv.layers

    @property
    def quanta(self) -> tuple[int, ...]:
        """Group quanta that have memory in every kept layer, ascending."""
        return self._kv.quanta

    @property
    def num_missing_pages(self) -> int:
        """Pages that the parameters of dropped layers need when they are mapped again."""
        return self._parameters.num_pages

    @property
    def num_spare_pages(self) -> int:
        """Free pages beyond those that unmapped parameters will need."""
        return max(0, len(self._free) - self.num_missing_pages)

    def drop(
        self,
        pages: Sequence[Page],
        quanta: Sequence[int],
        used: Sequence[int],
        kept: range,
        first_quantum: int,
        num_quanta: int,
    ) -> None:
        """Unmap the other layers' parameters, and map all pages behind ``num_quanta`` group quanta of ``kept``.

        The KV of ``used`` keeps its bytes, as group quanta ``first_quantum`` and following: in kept layers for good, in
        the others readable until ``settle``. Bytes of other quanta are unspecified.

        Args:
            pages: ``Shrunk.pages`` of a pool that shrank to 0: layer by layer, in each quantum by quantum.
            quanta: The pool's whole quanta, in the order of ``pages`` (``KVPool.quanta`` before the shrink).
            used: The ones of ``quanta`` whose bytes are kept, in the order of their group quanta.
            kept: Adjacent layers, one at least.

        Raises ``InvariantError`` if there is a group, a quantum is not whole, or pages are too few. After any error
        nothing changed: the caller owns ``pages``, and the parameters are mapped.
        """
        with self._lock:
            if self.kept:
                raise InvariantError("a member of a group drops layers with drop_more")
            if len(pages) != self._num_layers * len(quanta) * self.quantum_pages:
                raise InvariantError(f"{len(pages)} pages are not {len(quanta)} whole quanta of all layers")
            held = sort_pages(pages, range(self._num_layers), quanta, self.quantum_pages)
            self._regroup(held, used, kept, first_quantum, num_quanta)

    def drop_more(self, used: Sequence[int], kept: range, first_quantum: int, num_quanta: int) -> None:
        """Drop further layers of a settled member, as ``drop`` does, from this group's own quanta.

        ``used`` are present ids, in the order of their new ones; ``kept`` are some of the layers kept so far.
        """
        with self._lock:
            if not self.kept or self._kv.leaving or not set(kept) <= set(self.kept):
                raise InvariantError(f"layers {kept} are not some of the settled layers {self.kept}")
            held = {layer: dict(arena.pages) for layer, arena in self._kv.arenas.items()}
            self._regroup(held, used, kept, first_quantum, num_quanta)

    def settle(self, num_quanta: int) -> list[int] | None:
        """Unmap leaving KV, which is gone even if the rest raises ``UserError``, and ``grow`` to ``num_quanta``."""
        with self._lock:
            num_leaving = sum(len(arena.pages) for arena in self._kv.leaving.values())
            if not self._can_grow(num_quanta, len(self._free) + num_leaving * self.quantum_pages):
                return None
            self._free += self._kv.empty_leaving()
            return self.grow(num_quanta)

    def grow(self, num_quanta: int) -> list[int] | None:
        """Map free pages behind the lowest empty quanta until there are ``num_quanta``; None without room for all."""
        with self._lock:
            if not self._can_grow(num_quanta, len(self._free)):
                return None
            before = {*self.quanta}
            empty = [quantum for quantum in range(self._kv.max_quanta) if quantum not in before]
            new = empty[: max(0, num_quanta - len(before))]
            self._free.sort()
            cut = len(new) * len(self.kept) * self.quantum_pages
            self._kv.grow(new, self._free[:cut])
            self._free = self._free[cut:]
            return new

    def shrink(self, moves: Sequence[tuple[int, int]], quanta: Sequence[int]) -> None:
        """Copy blocks (source, destination) in the kept layers, then unmap group quanta; their pages are free.

        No destination is a source. Leaving KV does not move: settle before.
        """
        with self._lock:
            if self._kv.leaving:
                raise InvariantError("a group shrinks before it has settled")
            self._free += self._kv.shrink(moves, quanta)

    def map_parameters(self) -> bool:
        """Put free pages behind the parameters of dropped layers, for the caller to fill; False if they are too few."""
        with self._lock:
            num_pages = self._parameters.num_pages
            if num_pages > len(self._free):
                return False
            self._free.sort()
            self._parameters.map(self._free[:num_pages])
            self._owned -= {*self._free[:num_pages]}
            self._free = self._free[num_pages:]
            return True

    def take_spare(self, num_pages: int) -> list[Page] | None:
        """Take spare pages, such as for ``KVPool.grow``; None if there are too few."""
        with self._lock:
            if num_pages > self.num_spare_pages:
                return None
            self._free.sort()
            cut = len(self._free) - num_pages
            taken, self._free = self._free[cut:], self._free[:cut]
            self._owned -= {*taken}
            return taken

    def read(self, layer: int, blocks: Sequence[int]) -> np.ndarray | None:
        """A copy of a layer's part of group blocks: uint8 [n, layer_block_bytes]; None if any has no memory here."""
        with self._lock:
            arena = self._kv.find(layer, blocks)
            return None if arena is None else arena.read(blocks)

    def write(self, layer: int, blocks: Sequence[int], data: np.ndarray) -> bool:
        """Write a kept layer's part of blocks that no step uses, uint8 [n, layer_block_bytes]; False if not here."""
        with self._lock:
            arena = self._kv.find(layer, blocks)
            if arena is None or layer not in self.kept:
                return False
            arena.write(blocks, data)
            return True

    def abandon(self) -> list[Page]:
        """End the group from any state: unmap all KV, map all parameters, unfilled; returns all other pages.

        After a ``UserError`` the KV is gone, and it can be called again.
        """
        with self._lock:
            self._free += self._kv.empty()
            self.kept = range(0)
            if not self.map_parameters():
                raise InvariantError(f"{len(self._free)} pages are left for {self.num_missing_pages} of parameters")
            pages, self._free, self._owned = self._free, [], set()
            return pages

    def close_group(self) -> list[Page]:
        """End the group in order: as ``abandon``, but ``InvariantError`` if parameters have no pages."""
        with self._lock:
            if self._parameters.layers:
                raise InvariantError(f"a group ends, and layers {self._parameters.layers} have no parameters")
            return self.abandon()

    def check_integrity(self) -> None:
        """Raise ``InvariantError`` unless every page is in one place and all kept layers have the same quanta."""
        with self._lock:
            pages = self._all_pages()
            if len(pages) != len(self._owned) or {*pages} != self._owned:
                raise InvariantError(f"a group owns {len(self._owned)} pages, and {len(pages)} are found")
            if [*self._kv.arenas] != [*self.kept]:
                raise InvariantError(f"layers {[*self._kv.arenas]} have KV, and {self.kept} are kept")
            if any(arena.pages.keys() != {*self.quanta} for arena in self._kv.arenas.values()):
                raise InvariantError("kept layers have different quanta")
            if len(pages) < self.num_missing_pages:
                raise InvariantError(f"{len(pages)} pages are too few for the parameters")

    def _regroup(self, held: LayerPages, used: Sequence[int], kept: range, first: int, num_quanta: int) -> None:
        """Remap held, free and dropped parameters' pages for ``kept``; after an error all are where they were."""
        expect_group(held, used, kept, first, num_quanta)
        if not {*kept}.isdisjoint(self._parameters.layers):
            raise InvariantError(f"parameters of layers {kept} are not all mapped")
        free = self._free + self._parameters.find_pages(kept)
        places = place_pages(held, free, used, kept, first, num_quanta, self.quantum_pages)
        self._kv.place(places, places.num_pages // (len(kept) * self.quantum_pages), first)
        self._parameters.unmap(kept)
        self._free, self.kept = places.spare, kept
        self._owned = {*self._all_pages()}

    def _can_grow(self, num_quanta: int, num_free: int) -> bool:
        num_pages = (num_quanta - len(self.quanta)) * len(self.kept) * self.quantum_pages
        return num_quanta <= self._kv.max_quanta and num_pages <= num_free

    def _all_pages(self) -> list[Page]:
        return self._free + self._kv.find_pages()
