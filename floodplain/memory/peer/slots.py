"""Slots on neighbours' devices, and the copies between them and slots in this host's memory.

Slots are added and removed by the *chunk*: the slots that one lease has room for. A chunk that must be returned now is
removed on another thread, whatever the step loop is doing: copies under way there end first, and later copies find no
memory, which is a miss and never a wrong byte.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import Direction, Tier
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.peer.memory import Extent
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots, SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyEngine


class PeerSlots(Slots):
    """``Slots`` in leased memory. Chunk ``i``, of ``max_chunks``, holds the slots from ``i * chunk_slots`` on."""

    tier = Tier.PEER

    def __init__(self, layout: KVLayout, chunk_slots: int, max_chunks: int) -> None:
        super().__init__(layout, chunk_slots * max_chunks)
        self.chunk_slots, self.max_chunks = chunk_slots, max_chunks
        self._changed = threading.Condition()
        self._num_users = np.zeros(max_chunks, dtype=np.int64)
        self._num_copies = np.zeros(max_chunks, dtype=np.int64)
        self._extents: dict[int, Extent] = {}
        self._bases = np.zeros(max_chunks, dtype=np.uint64)  # stays valid until the last user of a chunk ends
        self._is_usable = np.zeros(max_chunks, dtype=np.bool_)  # checked when a use begins

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk takes of a lease."""
        return self.chunk_slots * self.layout.block_bytes

    def slots_of(self, chunk: int) -> range:
        """The numbers of a chunk's slots."""
        return range(chunk * self.chunk_slots, (chunk + 1) * self.chunk_slots)

    def num_copies(self, chunk: int) -> int:
        """Copies that have begun to read or write a chunk, ever."""
        return int(self._num_copies[chunk])

    def add(self, chunk: int, extent: Extent) -> None:
        """Make an extent, owned from now on, the memory of a chunk; ``InvariantError`` if it has any, or too little."""
        with self._changed:
            if chunk in self._extents:
                raise InvariantError(f"chunk {chunk} of the slots has memory already")
            if extent.num_bytes < self.chunk_bytes:
                raise InvariantError(f"an extent of {extent.num_bytes} bytes for a chunk of {self.chunk_bytes}")
            self._extents[chunk], self._bases[chunk], self._is_usable[chunk] = extent, extent.address, True

    def remove(self, chunk: int) -> None:
        """Free a chunk's memory once no copy uses it; its content is lost. A second call does nothing."""
        with self._changed:
            self._is_usable[chunk] = False
            self._changed.wait_for(lambda: not self._num_users[chunk])
            extent = self._extents.pop(chunk, None)
            if extent is not None:
                self._bases[chunk] = 0
                self.digests[list(self.slots_of(chunk))] = EMPTY_DIGEST
                extent.close()

    def part(self, first: int, count: int) -> torch.Tensor:
        """Adjacent slots of one chunk as 32-bit words: [count, num_layers, layer_block_words]."""
        chunk, place = divmod(first, self.chunk_slots)
        shape = (self.chunk_slots, self.layout.num_layers, self.layout.layer_block_words)
        return self._extents[chunk].tensor(torch.int32, shape)[place : place + count]

    def pieces(self, first: int, count: int) -> Generator[tuple[int, int]]:
        """Adjacent slots as (address, number of slots), one for each chunk: chunks are not adjacent in memory."""
        end = first + count
        while first < end:
            chunk, place = divmod(first, self.chunk_slots)
            num_slots = min(end - first, self.chunk_slots - place)
            yield int(self._bases[chunk]) + place * self.layout.block_bytes, num_slots
            first += num_slots

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Where each of these slots (int64 [n]) begins in this process: uint64 [n]."""
        chunks, places = np.divmod(slots, self.chunk_slots)
        return self._bases[chunks] + places.astype(np.uint64) * np.uint64(self.layout.block_bytes)

    @contextmanager
    def use(self, slots: np.ndarray) -> Generator[np.ndarray]:
        """Keep the slots' chunks from removal while the context is open; yields which slots have memory, bool [n]."""
        chunks = slots // self.chunk_slots
        with self._changed:
            is_there = self._is_usable[chunks]
            used = np.unique(chunks[is_there])
            self._num_users[used] += 1
            self._num_copies[used] += 1
        try:
            yield is_there
        finally:
            with self._changed:
                self._num_users[used] -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Remove all chunks, each once no copy uses it."""
        for chunk in list(self._extents):
            self.remove(chunk)


class SlotStore:
    """Slots of one buffer as a ``BlockStore``: blocks of a single layer."""

    def __init__(self, slots: SwapSlots) -> None:
        self.layout = slots.layout
        self.words: tuple[torch.Tensor, ...] = (slots.words.view(slots.num_slots, -1),)
        self.slots = slots

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Raise ``InvariantError`` unless all numbers are of these slots."""
        self.slots.check(blocks)


@dataclass(frozen=True, slots=True)
class _Open:
    relocation: Relocation
    expected: np.ndarray


class SlotMover:
    """Copies between a buffer in this host's memory and slots elsewhere. One thread submits and polls.

    ``engine``, started, copies between ``SlotStore(host)`` and ``peer``; the mover owns it.
    """

    def __init__(self, host: SwapSlots, peer: Slots, engine: CopyEngine[Any]) -> None:
        self._host, self._peer = host, peer
        self._engine = engine
        self._open: dict[int, _Open] = {}
        self.moved_bytes = {Tier.HOST: 0, Tier.PEER: 0}
        """Bytes copied so far, by the tier that they were copied to."""

    @property
    def layout(self) -> KVLayout:
        """Shape of the blocks."""
        return self._host.layout

    def submit(self, relocation: Relocation) -> None:
        """Begin a relocation, and return at once."""
        to_peer = relocation.targets[0].tier is Tier.PEER
        far, near = (relocation.targets, relocation.sources) if to_peer else (relocation.sources, relocation.targets)
        direction = Direction.OUTBOUND if to_peer else Direction.INBOUND
        copy = BlockCopy(direction, tuple(one.slot for one in near), tuple(one.slot for one in far))
        expected = self._host.digests[list(copy.blocks)] if to_peer else self._peer.digests[list(copy.slots)]
        self._open[relocation.relocation_id] = _Open(relocation, expected)
        self._engine.submit(relocation.relocation_id, copy)

    def poll(self) -> list[tuple[int, Sequence[int]]]:
        """Ended relocations: (id, places in ``Relocation.sources`` of blocks that did not arrive whole, ascending)."""
        return [self._settle(result.transfer_id, result.digests) for result in self._engine.poll()]

    def close(self) -> None:
        """Let the copies in flight end, then stop."""
        self._engine.close()

    def _settle(self, relocation_id: int, digests: Sequence[int]) -> tuple[int, Sequence[int]]:
        """End a relocation: a block is whole if its copy has the digest that was stored when it left the device."""
        one = self._open.pop(relocation_id)
        found = np.asarray(digests, dtype=np.int64)
        is_whole = (found == one.expected) & (found != EMPTY_DIGEST)
        target = one.relocation.targets[0].tier
        slots = np.array([location.slot for location in one.relocation.targets], dtype=np.int64)
        if target is Tier.HOST:
            self._host.digests[slots] = np.where(is_whole, found, EMPTY_DIGEST)
        else:  # the copy itself stored the digests of whole ones
            self._peer.digests[slots[~is_whole]] = EMPTY_DIGEST
        self.moved_bytes[target] += len(slots) * self.layout.block_bytes
        return relocation_id, np.flatnonzero(~is_whole).tolist()
