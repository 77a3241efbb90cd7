"""Pages of one instance while it is in a group: it keeps fewer layers, so its KV pool has more blocks.

A member of a group computes its *kept* layers only. Pages of the other layers' parameters and KV are mapped behind more
blocks of the kept ones. Pages of used blocks are mapped at another address under group block ids: no byte is copied.
Where a method raises ``UserError``, the system's limit on mappings is reached, and nothing changed unless it says so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page
from floodplain.memory.group_kv import GroupKV
from floodplain.memory.group_places import LayerPages, expect_group, place_pages, sort_pages
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.paged_buffer import DroppedParameters, PagedBuffer


class GroupMemory:
    """Owner of one member's pages between ``drop`` and ``close_group`` or ``abandon``; empty before and after.

    A group block ``b`` is block ``b % Q`` of group quantum ``b // Q``, with Q = ``quantum_blocks``. All ids of blocks
    and quanta below are group ids, except ``quanta`` and ``used`` of ``drop``.

    Threads: every call takes one lock, so ``read`` and ``write`` copy mapped pages only. Compute uses ``layers``
    without the lock. Beside compute may run: ``read``, ``write`` of blocks that no step uses, ``settle``, ``grow``,
    ``map_parameters``, ``take_spare``. At a boundary only, with no kernel running: ``drop``, ``drop_more``, ``shrink``,
    ``abandon``, ``close_group``.

    Attributes:
        quantum_pages: Pages of one layer's quantum.
        kept: The layers that this member computes; empty without a group.
        layers: KV of the kept layers by the model's index, for compute: [max_blocks, 2, block_tokens, kv_heads,
            head_dim]. Other layers raise ``InvariantError``. Looked up anew at each access.
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
        the others readable until ``settle``. Bytes of other quanta are unspecified. The caller has checked, with all
        members, that the pages are enough.

        Args:
            pages: ``Shrunk.pages`` of a pool that shrank to 0: layer by layer, in each quantum by quantum.
            quanta: The pool's whole quanta, in the order of ``pages`` (``KVPool.quanta`` before the shrink).
            used: The ones of ``quanta`` whose bytes are kept, in the order of their group quanta.
            kept: Adjacent layers, one at least.

        Raises ``UserError``; ``InvariantError`` if there is a group, a quantum is not whole, or pages are too few.
        After any error nothing changed: the caller owns ``pages``, and the parameters are mapped.
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

        ``used`` are present ids, in the order of their new ones; ``kept`` are some of the layers kept so far. Raises as
        ``drop``, and ``InvariantError`` without a group or before it has settled.
        """
        with self._lock:
            if not self.kept or self._kv.leaving or not set(kept) <= set(self.kept):
                raise InvariantError(f"layers {kept} are not some of the settled layers {self.kept}")
            self._regroup(self._kv.find_held(), used, kept, first_quantum, num_quanta)

    def settle(self, num_quanta: int) -> list[int] | None:
        """Unmap leaving KV, and ``grow`` to ``num_quanta``: returns the new group quanta.

        None, with nothing changed, if pages or addresses are too few. If it raises ``UserError``, leaving KV is gone,
        and nothing has grown.
        """
        with self._lock:
            num_leaving = self._kv.num_leaving_quanta * self.quantum_pages
            if not self._can_grow(num_quanta, len(self._free) + num_leaving):
                return None
            self._free += self._kv.empty_leaving()
            return self.grow(num_quanta)

    def grow(self, num_quanta: int) -> list[int] | None:
        """Map free pages behind the lowest empty group quanta, until there are ``num_quanta``.

        Returns the new ones, ascending; None, with nothing changed, if pages or addresses are too few. Raises
        ``UserError``.
        """
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
        """Put free pages behind the parameters of dropped layers, unfilled; False if too few. Raises ``UserError``."""
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
        """A copy of one layer's part of group blocks, kept or leaving: uint8 [n, layer_block_bytes].

        None if the layer has no KV here, or a block has no memory.
        """
        with self._lock:
            arena = self._kv.find(layer, blocks)
            return None if arena is None else arena.read(blocks)

    def write(self, layer: int, blocks: Sequence[int], data: np.ndarray) -> bool:
        """Write one kept layer's part of group blocks that no step uses from ``data``, uint8 [n, layer_block_bytes].

        False, with nothing written, if the layer is not kept or a block has no memory.
        """
        with self._lock:
            arena = self._kv.find(layer, blocks)
            if arena is None or layer not in self.kept:
                return False
            arena.write(blocks, data)
            return True

    def abandon(self) -> list[Page]:
        """End the group from any state: unmap all KV, and map all parameters, unfilled.

        Returns all other pages: those of the pool before ``drop``, less what ``take_spare`` gave; empty without a
        group. If it raises ``UserError``, the KV is gone, and it can be called again.
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
