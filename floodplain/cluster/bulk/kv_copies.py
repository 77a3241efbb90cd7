"""Copies of KV and parameters between instances: the stores that one serves, and the side that pulls and verifies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from floodplain.cluster.bulk.client import BulkClient, BulkItem, Sink
from floodplain.cluster.bulk.server import NotServed
from floodplain.core.errors import PeerLost
from floodplain.core.tiers import find_slot
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.group_memory import GroupMemory
from floodplain.memory.kv_layout import read_blocks, write_blocks
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.paged_buffer import PagedBuffer
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots

logger = logging.getLogger(__name__)

KV, SWAP, PARAMETERS = "kv", "swap", "parameters"
"""Names of stores: part = layer; indices = blocks by the group's ids, slots of swap space, or pieces."""
PIECE_BYTES = 2**20
"""Bytes of one index of the parameter store."""

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
Writer = Callable[[int, Sequence[int], ByteArray], bool]
"""Writes (layer, blocks, their bytes); False if it has no memory for them."""


class KvStore:
    """Serves the KV of a member's group memory to other members; a ``bulk.server.Store``."""

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory

    def read(self, part: int, indices: IntArray) -> ByteArray:
        """The bytes of blocks ``indices`` in layer ``part``."""
        data = self._memory.read(part, indices.tolist())
        if data is None:
            raise NotServed(f"KV of layer {part} is not here, or blocks have no memory")
        return data


class ParameterStore:
    """Serves parameters of the layers that a member has to other members; a ``bulk.server.Store``."""

    def __init__(self, buffers: Sequence[PagedBuffer]) -> None:
        self._buffers = buffers

    def read(self, part: int, indices: IntArray) -> ByteArray:
        """The bytes of pieces ``indices`` of layer ``part``."""
        buffer = self._buffers[part]
        if not buffer.is_filled or int(indices.max(initial=0)) >= count_pieces(buffer):
            raise NotServed(f"parameters of layer {part} are not here")
        return np.concatenate([buffer.tensor[piece_of(int(index))].cpu().numpy() for index in indices])


def count_pieces(buffer: PagedBuffer) -> int:
    """The number of pieces of a layer's parameters."""
    return -(-buffer.tensor.numel() // PIECE_BYTES)


def piece_of(index: int) -> slice:
    """The byte range of a piece."""
    return slice(index * PIECE_BYTES, (index + 1) * PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class RequestCopy:
    """One request's KV to copy, from blocks or swap slots (``core.tiers``) at the members that have it.

    ``targets`` are the local blocks, in the same order; ``layers`` are those to copy from each address.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    layers: Mapping[str, Sequence[int]]

    def find_targets(self) -> dict[str, dict[int, int]]:
        """For each store that has some of the blocks: the local block of each index of that store."""
        found: dict[str, dict[int, int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            slot = find_slot(source)
            name, index = (KV, source) if slot is None else (SWAP, slot)
            found.setdefault(name, {})[index] = target
        return found


class Puller:
    """Pulls from bulk servers of other members. One thread at a time, except for ``close``."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._clients: dict[str, BulkClient] = {}
        self._lost: set[str] = set()
        self._is_closed = False

    def copy(self, one: RequestCopy, write: Writer) -> bool:
        """Copy a request's KV. True if all of it is here now and every chunk was verified."""
        targets_of, is_written = one.find_targets(), True

        def sink(item: BulkItem, indices: IntArray, data: ByteArray) -> None:
            nonlocal is_written
            targets = [targets_of[item.store][index] for index in indices.tolist()]
            is_written = write(item.part, targets, data.reshape(len(targets), -1)) and is_written

        indices = {store: np.array([*found], dtype=np.int64) for store, found in targets_of.items()}
        for address, layers in one.layers.items():
            items = [BulkItem(store, layer, some) for store, some in indices.items() for layer in layers]
            if not all(self._fetch(address, items, sink)):
                return False
        return is_written

    def fill(self, address: str, layer: int, buffer: PagedBuffer) -> bool:
        """Copy a layer's parameters into its buffer. True if all arrived; the caller verifies their content."""

        def sink(_: BulkItem, indices: IntArray, data: ByteArray) -> None:
            start = int(indices[0]) * PIECE_BYTES
            buffer.tensor[start : start + len(data)].copy_(torch.from_numpy(data))

        item = BulkItem(PARAMETERS, layer, np.arange(count_pieces(buffer), dtype=np.int64))
        return all(self._fetch(address, [item], sink))

    def close(self) -> None:
        """Abort the copies under way, which then fail. May be called on any thread."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()

    def _fetch(self, address: str, items: Sequence[BulkItem], sink: Sink) -> list[bool]:
        """Whether each item arrived whole: none if the peer is lost, in this and later calls."""
        while address not in self._lost and not self._is_closed:
            is_new = address not in self._clients
            try:
                return self._client(address).fetch(items, sink)
            except PeerLost as error:
                self._clients.pop(address).close()
                if is_new and not self._is_closed:  # else the server may have closed a connection that was long idle
                    logger.warning("a copy from %s failed: %s", address, error)
                    self._lost.add(address)
        return [False] * len(items)

    def _client(self, address: str) -> BulkClient:
        if address not in self._clients:
            self._clients[address] = client = BulkClient(address, self._secret)
            if self._is_closed:
                client.close()
            client.start()
        return self._clients[address]


def group_layers(layers: Iterable[int], address_of: Callable[[int], str]) -> dict[str, list[int]]:
    """The layers, grouped by the address that each is copied from."""
    found: dict[str, list[int]] = {}
    for layer in layers:
        found.setdefault(address_of(layer), []).append(layer)
    return found


def write_pool(pool: KVPool) -> Writer:
    """A writer of blocks of ``pool`` that are loading: no step reads them."""

    def write(layer: int, blocks: Sequence[int], data: ByteArray) -> bool:
        if not all(pool.is_backed(block) for block in blocks):
            return False
        write_blocks(pool.words[layer], blocks, data)
        return True

    return write


def copy_own(memory: GroupMemory, one: RequestCopy, layers: Iterable[int], write: Writer) -> bool:
    """Copy layers that the member itself has, from its group memory. True if all were copied."""
    for layer in layers:
        data = memory.read(layer, one.sources)
        if data is None or not write(layer, one.targets, data):
            return False
    return True


class SwapStore:
    """A ``bulk.server.Store`` over a member's swap space: part = layer, indices = slots.

    A slot is read only after its content was verified by the digest of its swap-out. No slot is written between
    ``forget`` and the last ``read``.
    """

    def __init__(self, slots: SwapSlots) -> None:
        layout = slots.layout
        self._slots = slots
        self._weights = compute_weights(layout.num_layers * layout.layer_block_words)
        self._proven: set[int] = set()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget which slots were verified: they may have been written since."""
        with self._lock:
            self._proven.clear()

    def read(self, part: int, indices: IntArray) -> ByteArray:
        """One layer of some slots: uint8 [num_indices, layer_block_bytes]. ``NotServed`` if one is not whole."""
        slots = indices.tolist()
        is_there = 0 <= part < self._slots.layout.num_layers and all(0 <= s < self._slots.num_slots for s in slots)
        if not is_there or not self._prove(slots):
            raise NotServed(f"swap space has not layer {part} of slots {slots[:8]}, or not as it was written")
        return read_blocks(self._slots.words[:, part], indices)

    def _prove(self, slots: Iterable[int]) -> bool:
        with self._lock:
            return all(slot in self._proven or self._prove_one(slot) for slot in slots)

    def _prove_one(self, slot: int) -> bool:
        expected = int(self._slots.digests[slot])
        words = self._slots.part(slot, 1).numpy().reshape(1, -1)
        is_whole = expected != EMPTY_DIGEST and int(compute_digests(words, self._weights)[0]) == expected
        if is_whole:
            self._proven.add(slot)
        return is_whole


def copy_slots(swap: SwapStore | None, layers: Iterable[int], one: RequestCopy, write: Writer) -> bool:
    """Copy what a request has in the own swap space. True if all of it was there and verified."""
    if swap is None:
        return False
    targets = one.find_targets().get(SWAP, {})
    slots = np.array([*targets], dtype=np.int64)
    try:
        return all(write(layer, [*targets.values()], swap.read(layer, slots)) for layer in layers)
    except NotServed:
        return False
