"""KV of streamed layers: the memory each layer computes in, copies around it, and how layers start and stop streaming.

Blocks have the same ids in all layers. When a slot changes its layer, its content is invalid; a layer's copy lacks only
what the line has not written yet. The order of copies alone makes both correct (``memory.layer_line``).

A second, *near* copy behind a faster link, in a neighbour's memory, only makes loads faster: *home*, in the host's
memory, is always complete, and a near copy may be added with any content, or dropped, at any time. Its block is *stale*
while it may differ from home, and filled from there, by the same line, just before a load that reads it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.layer_places import LayerPlaces
from floodplain.memory.arena import Page
from floodplain.memory.kv_layout import LayerTensors
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_line import LayerLine, StepClock, Ticket

_MEASURED_BYTES, _MEASURED_COPIES = 2**23, 3
"""Bytes of one copy when bandwidth is measured, and the number of copies."""


class NearCopies:
    """Adds, fills and drops near copies of ``homes``. Any thread may call ``drop``; the one that submits, the rest."""

    def __init__(self, line: LayerLine, homes: Mapping[int, torch.Tensor], max_blocks: int, block_bytes: int) -> None:
        self._line = line
        self._homes = homes
        self.max_blocks = max_blocks
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._is_stale: dict[int, np.ndarray] = {}  # layer that has a near copy -> bool [max_blocks]

    @property
    def layers(self) -> frozenset[int]:
        """Layers that have a near copy now."""
        with self._lock:
            return frozenset(self._is_stale)

    @property
    def copy_bytes(self) -> int:
        """Bytes of one layer's near copy: it has room for every block that the pool may ever have."""
        return self.max_blocks * self.block_bytes

    def add(self, layer: int, words: torch.Tensor) -> None:
        """Give a streamed layer a near copy, int32 [max_blocks, layer_block_words] of any content, until ``drop``."""
        home = self._homes.get(layer)
        if home is None or words.shape != home.shape or words.dtype != home.dtype or not words.is_contiguous():
            raise InvariantError(f"layer {layer} cannot have a near copy of shape {tuple(words.shape)}")
        with self._lock:
            self._is_stale[layer] = np.ones(self.max_blocks, dtype=np.bool_)
            self._line.place(layer, home, words)

    def measure_bandwidth(self, words: torch.Tensor) -> float:
        """Bytes per second onto the device from memory for a near copy, the best of a few. It takes milliseconds."""
        part = words.view(-1)[: _MEASURED_BYTES // words.itemsize]
        place = torch.empty_like(part)
        return max(part.nbytes / max(self._measure_s(place, part), 1e-9) for _ in range(_MEASURED_COPIES))

    def _measure_s(self, place: torch.Tensor, part: torch.Tensor) -> float:
        begin = self._line.mark()
        place.copy_(part)
        end = self._line.mark()
        while (seconds := self._line.elapsed_s(begin, end)) is None:
            time.sleep(1e-4)
        return seconds

    def drop(self, layer: int) -> None:
        """Drop a layer's near copy, if it has one. Its memory may be freed when this returns."""
        with self._lock:
            if self._is_stale.pop(layer, None) is not None:
                self._line.place(layer, self._homes[layer])

    def note_changed(self, blocks: Collection[int]) -> None:
        """Mark blocks stale that something other than the line writes at home before the next step reads them."""
        with self._lock:
            for is_stale in self._is_stale.values():
                is_stale[list(blocks)] = True

    def mend(self, layer: int, offsets: np.ndarray) -> None:
        """Fill the stale ones of these blocks (byte offsets, int64 [any], each once) before their load is submitted."""
        with self._lock:
            is_stale = self._is_stale.get(layer)
            if is_stale is None:
                return
            blocks = offsets // self.block_bytes
            stale = is_stale[blocks]
            is_stale[blocks] = False
        if stale.any():
            self._line.fill(layer, offsets[stale], self.block_bytes)

    def close(self) -> None:
        """Forget all near copies, because the line closes."""
        with self._lock:
            self._is_stale.clear()


OpenHome = Callable[[tuple[int, ...]], torch.Tensor]
"""Makes a layer's copy off the device: int32 of this shape; page-locked beside a GPU."""
CloseHome = Callable[[torch.Tensor], None]
"""Gives back what ``OpenHome`` made."""
Remap = Callable[[dict[BlockId, BlockId]], None]
"""Rewrites every block table, old block to new block."""

_MEASURED_BLOCKS, _MEASURED_TIMES = 256, 3
"""Blocks of one load when bandwidth is measured, and the number of loads."""


class LayerSlots(LayerTensors):
    """The KV of each layer for compute, [max_blocks, 2, block_tokens, kv_heads, head_dim], and hooks around the layers.

    All layers of ``pool`` are mapped and none is placed elsewhere; only this object changes that. It closes ``line``.

    ``step_bytes``: bytes of one layer that the step under way reads: what each load of it brings. ``near``: second
    copies of streamed layers; a copy is dropped when its layer stops streaming.
    """

    def __init__(
        self, pool: KVPool, line: LayerLine, num_slots: int, open_home: OpenHome, close_home: CloseHome
    ) -> None:
        super().__init__(pool.layout.num_layers, lambda layer: pool.layers[self.places.arena_of(layer)])
        self.places = LayerPlaces(pool.layout.num_layers, 0, num_slots)
        self.step_bytes = 0
        self.line = line
        self._clock = StepClock(line)
        self._pool = pool
        self._open_home, self._close_home = open_home, close_home
        self._base_blocks = pool.num_blocks
        self._homes: dict[int, torch.Tensor] = {}
        self._spare: list[Page] = []
        self._tickets: dict[int, Ticket] = {}  # slot -> the last copy from or to it
        self._reads = self._rows = np.zeros(0, dtype=np.int64)
        self._block_bytes = pool.layout.layer_block_bytes
        self._row_bytes = self._block_bytes // (2 * pool.layout.block_tokens)
        self.near = NearCopies(line, self._homes, pool.max_blocks, self._block_bytes)

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, read_blocks: np.ndarray, written_tokens: np.ndarray) -> None:
        """Start a step: load the blocks that its first streamed layers read.

        ``read_blocks`` have a token that the step reads and does not write itself; ``written_tokens``, ``block *
        block_tokens + offset``, are where its keys and values go. Both are int64 [any].
        """
        self._clock.begin_step()
        is_read = np.zeros(self._pool.max_blocks, dtype=np.bool_)
        is_read[read_blocks] = True  # many sequences share blocks; sorting them would take milliseconds
        blocks = np.flatnonzero(is_read)
        self.step_bytes = len(blocks) * self._block_bytes
        if not self.places.num_streamed:
            return
        self._reads = blocks * self._block_bytes
        self._rows = self._find_rows(written_tokens)
        for layer in self.places.first:
            self._load(layer)

    def before_layer(self, index: int) -> None:
        """Make compute wait until the rows of a slot's last layer are written, and its new layer is whole."""
        slot = self.places.slot_of(index)
        ticket = None if slot is None else self._tickets.pop(slot, None)
        if ticket is not None:
            self._clock.wait(ticket)

    def after_layer(self, index: int) -> None:
        """Write a streamed layer's new rows to its copy, then load the next layer into its slot."""
        if index == len(self) - 1:
            self._clock.end_step()
        slot = self.places.slot_of(index)
        if slot is None:
            return
        self._tickets[slot] = self.line.write(index, self[index], self._rows, self._row_bytes)
        follower = self.places.follower(index)
        if follower is not None:
            self._load(follower)

    def take_step_s(self) -> float:
        """Seconds that the layers of the last step computed, without waits."""
        return self._clock.take_step_s()

    @property
    def stall_s(self) -> float:
        """Seconds for which compute waited for loads; those of a step are known when the next one begins."""
        return self._clock.stall_s

    @property
    def block_bytes(self) -> int:
        """Device memory of a block."""
        return self._pool.block_bytes

    @property
    def home_bytes(self) -> int:
        """Bytes of the home copies, counting the blocks that the pool has now."""
        return len(self._homes) * self._pool.num_blocks * self._block_bytes

    def settle(self) -> None:
        """Wait until every layer's copy is complete, so that blocks may be swapped or moved."""
        self.line.drain()

    def _load(self, layer: int) -> None:
        slot = self.places.slot_of(layer)
        if slot is not None and len(self._reads):
            self.near.mend(layer, self._reads)
            self._tickets[slot] = self.line.load(layer, self[layer], self._reads, self._block_bytes)

    def _find_rows(self, tokens: np.ndarray) -> np.ndarray:
        """Byte offsets of these tokens' keys and values, sorted: adjacent rows are copied together."""
        block_tokens = self._pool.layout.block_tokens
        keys = tokens // block_tokens * self._block_bytes + tokens % block_tokens * self._row_bytes
        return np.sort(np.concatenate((keys, keys + self._block_bytes // 2)))

    # -- other places, at a boundary -------------------------------------------------------------------------------

    def count_blocks(self, places: LayerPlaces) -> int:
        """Blocks, in whole quanta, that the pool's memory holds with layers at ``places``."""
        num_pages = self._pool.num_mapped_pages + len(self._spare)
        quantum_pages = self._pool.count_pages(self._pool.quantum_blocks) // len(self._pool.mapped_layers)
        return num_pages // (places.num_arenas * quantum_pages) * self._pool.quantum_blocks

    def change_to(self, places: LayerPlaces, ledger: BlockLedger, remap: Remap) -> None:
        """Stream more layers for a larger pool, or fewer for a smaller pool, as far as used blocks allow.

        No step or copy to swap space is outstanding. If used blocks need the pages, a change to fewer stays incomplete,
        and a later call continues it. ``remap`` is called as soon as blocks have moved. Raises ``UserError``, with no
        layer changed, if there is no memory for a copy.
        """
        if self.places == places:
            return
        self.settle()
        if places.num_streamed > self.places.num_streamed:
            self._stream_more(places, ledger)
        else:
            self._stream_fewer(places, ledger, remap)

    def _stream_more(self, places: LayerPlaces, ledger: BlockLedger) -> None:
        leaving = [layer for layer in places.streamed if self.places.slot_of(layer) is None]
        content = self._offsets_of_content(ledger)
        for layer in leaving:
            if layer not in self._homes:
                self._homes[layer] = self._open_home(tuple(self._pool.words[layer].shape))
        for layer in leaving:
            self.line.place(layer, self._homes[layer])
            self.line.write(layer, self._pool.layers[layer], content, self._block_bytes)
        self.line.drain()
        for layer in leaving:
            self._pool.place_layer(layer, self._homes[layer])
        self._spare += self._pool.unmap_layers(sorted({*self.places.arenas} - {*places.arenas}))
        self.places = places
        self._grow(ledger)

    def _grow(self, ledger: BlockLedger) -> None:
        """Map spare pages behind new blocks; pages that make no whole quantum in all arenas stay spare."""
        target = self.count_blocks(self.places) if self.places.num_streamed else self._base_blocks
        missing = target - self._pool.num_blocks
        num_pages = self._pool.count_growth_pages(missing) if missing > 0 else None
        if num_pages is not None and num_pages <= len(self._spare):
            self._pool.grow(ledger, missing, self._spare[:num_pages])
            del self._spare[:num_pages]

    def _stream_fewer(self, places: LayerPlaces, ledger: BlockLedger, remap: Remap) -> None:
        shrunk = self._pool.shrink(ledger, self.count_blocks(places))
        if shrunk.moved:
            remap(shrunk.moved)
        self.near.note_changed(shrunk.moved.values())
        self._spare += shrunk.pages
        returning = sorted({*places.arenas} - {*self.places.arenas})
        num_pages = len(returning) * self._pool.num_layer_pages
        if num_pages <= len(self._spare):
            self._pool.map_layers(returning, self._spare[:num_pages])
            del self._spare[:num_pages]
            self._bring_home(places, ledger)

    def _bring_home(self, places: LayerPlaces, ledger: BlockLedger) -> None:
        content = self._offsets_of_content(ledger)
        staying = [layer for layer in self.places.streamed if places.slot_of(layer) is None]
        for layer in staying:
            self.near.drop(layer)  # some of these blocks may be stale in it
            self.line.load(layer, self._pool.layers[layer], content, self._block_bytes)
        self.line.drain()
        for layer in staying:
            self._pool.place_layer(layer, None)
            self.line.place(layer, None)
            self._close_home(self._homes.pop(layer))
        self.places = places
        self._grow(ledger)

    def measure_bandwidth(self) -> float:
        """Bytes per second of loads here, the best of a few. The pool is empty."""
        layer = self.places.streamed[0] if self.places.num_streamed else 0
        place, num_blocks = self[layer], min(_MEASURED_BLOCKS, self._pool.num_blocks)
        offsets = np.arange(num_blocks, dtype=np.int64) * self._block_bytes
        home = None if self.places.num_streamed else self._open_home((num_blocks, self._block_bytes // 4))
        if home is not None:
            self.line.place(layer, home)
            self.line.write(layer, place, offsets, self._block_bytes)
        best = max(self._measure_load(layer, place, offsets) for _ in range(_MEASURED_TIMES))
        if home is not None:
            self.line.place(layer, None)
            self._close_home(home)
        return best

    def _measure_load(self, layer: int, place: torch.Tensor, offsets: np.ndarray) -> float:
        before = self.line.stats()
        self.line.load(layer, place, offsets, self._block_bytes)
        self.line.drain()
        after = self.line.stats()
        return (after.loaded_bytes - before.loaded_bytes) / max(after.load_s - before.load_s, 1e-9)

    def _offsets_of_content(self, ledger: BlockLedger) -> np.ndarray:
        blocks = ledger.blocks_with_content()
        if not all(map(self._pool.is_backed, blocks)):
            raise InvariantError("the ledger has blocks that the pool does not back")
        return np.array(blocks, dtype=np.int64) * self._block_bytes

    def close(self) -> None:
        """Close the line, and release spare pages and copies. The tensors must not be used any more."""
        self.near.close()
        self.line.close()
        self._pool.device.release(self._spare)
        self._spare = []
        while self._homes:
            self._close_home(self._homes.popitem()[1])


def find_read_blocks(tables: np.ndarray, lengths: np.ndarray, block_tokens: int) -> np.ndarray:
    """Blocks, int64 [any], that hold the first ``lengths`` [B] tokens of sequences with ``tables`` [B, max_blocks]."""
    num_blocks = -(-lengths // block_tokens)
    blocks: np.ndarray = tables[np.arange(tables.shape[1]) < num_blocks[:, None]]
    return blocks
