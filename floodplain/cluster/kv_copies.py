"""Copies of KV and parameters between members of a group: what one serves, and how another one takes it.

A member pulls: it knows what it lacks, verifies each chunk, and says of each request whether all of it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from floodplain.cluster.bulk_client import BulkClient, BulkItem, Outcome
from floodplain.cluster.bulk_stores import NotServed
from floodplain.core.errors import PeerLost
from floodplain.core.kv_sources import find_slot
from floodplain.memory.group_memory import GroupMemory
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.paged_buffer import PagedBuffer

logger = logging.getLogger(__name__)

KV, SWAP, PARAMETERS = "kv", "swap", "parameters"
"""Names of stores: part = layer; indices = blocks by the group's ids, slots of swap space, or pieces."""
PIECE_BYTES = 2**20
"""Of parameters: an index of their store."""

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
Writer = Callable[[int, Sequence[int], ByteArray], bool]
"""Writes (layer, blocks, their bytes); False if it has no memory for them."""


class KvStore:
    """KV of a member's group memory, for others; see ``bulk_stores.Store``.

    Args:
        memory: Of the member.
    """

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory

    def read(self, part: int, indices: IntArray) -> ByteArray:
        """See ``Store``."""
        data = self._memory.read(part, indices.tolist())
        if data is None:
            raise NotServed(f"KV of layer {part} is not here, or blocks have no memory")
        return data


class ParameterStore:
    """Parameters of the layers that a member has, for others; see ``bulk_stores.Store``.

    Args:
        buffers: Of all layers of the model.
    """

    def __init__(self, buffers: Sequence[PagedBuffer]) -> None:
        self._buffers = buffers

    def read(self, part: int, indices: IntArray) -> ByteArray:
        """See ``Store``."""
        buffer = self._buffers[part]
        if not buffer.is_filled or int(indices.max(initial=0)) >= count_pieces(buffer):
            raise NotServed(f"parameters of layer {part} are not here")
        return np.concatenate([buffer.tensor[piece_of(int(index))].cpu().numpy() for index in indices])


def count_pieces(buffer: PagedBuffer) -> int:
    """Pieces of a layer's parameters."""
    return -(-buffer.tensor.numel() // PIECE_BYTES)


def piece_of(index: int) -> slice:
    """The bytes of a piece."""
    return slice(index * PIECE_BYTES, (index + 1) * PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class RequestCopy:
    """One request's KV, to be copied.

    Attributes:
        request: The front's number of it.
        sources: Its blocks where it lies: see ``core.kv_sources``.
        targets: The same here.
        layers: Which layers come from which bulk server.
    """

    request: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    layers: Mapping[str, Sequence[int]]

    def find_targets(self) -> dict[str, dict[int, int]]:
        """For each store that has some of its blocks: the block here for each index there."""
        found: dict[str, dict[int, int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            slot = find_slot(source)
            name, index = (KV, source) if slot is None else (SWAP, slot)
            found.setdefault(name, {})[index] = target
        return found


class Puller:
    """Pulls from the bulk servers of other members; one thread at a time, but for ``close``.

    Args:
        secret: Of the group.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._clients: dict[str, BulkClient] = {}
        self._lost: set[str] = set()
        self._is_closed = False

    def copy(self, one: RequestCopy, write: Writer) -> bool:
        """Whether all of a request's KV is here now, proven whole."""
        targets_of, is_written = one.find_targets(), True

        def sink(item: BulkItem, indices: IntArray, data: ByteArray) -> None:
            nonlocal is_written
            targets = [targets_of[item.store][index] for index in indices.tolist()]
            is_written = write(item.part, targets, data.reshape(len(targets), -1)) and is_written

        indices = {store: np.array([*found], dtype=np.int64) for store, found in targets_of.items()}
        for address, layers in one.layers.items():
            items = [BulkItem(store, layer, some) for store, some in indices.items() for layer in layers]
            if not all(outcome is Outcome.OK for outcome in self._fetch(address, items, sink)):
                return False
        return is_written

    def fill(self, address: str, layer: int, buffer: PagedBuffer) -> bool:
        """Whether a layer's parameters are in its buffer now; the caller proves that they are the right ones."""

        def sink(_: BulkItem, indices: IntArray, data: ByteArray) -> None:
            start = int(indices[0]) * PIECE_BYTES
            buffer.tensor[start : start + len(data)].copy_(torch.from_numpy(data))

        item = BulkItem(PARAMETERS, layer, np.arange(count_pieces(buffer), dtype=np.int64))
        return self._fetch(address, [item], sink) == [Outcome.OK]

    def close(self) -> None:
        """End what is under way, which then fails; on any thread."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()

    def _fetch(
        self, address: str, items: Sequence[BulkItem], sink: Callable[[BulkItem, IntArray, ByteArray], None]
    ) -> list[Outcome]:
        """The outcome of each item; all are missing if the other end is lost, now and from then on."""
        while address not in self._lost and not self._is_closed:
            is_new = address not in self._clients
            try:
                return self._client(address).fetch(items, sink)
            except PeerLost as error:
                self._clients.pop(address).close()
                if is_new:  # else the server may have closed what was idle for long
                    logger.warning("a copy from %s failed: %s", address, error)
                    self._lost.add(address)
        return [Outcome.MISSING] * len(items)

    def _client(self, address: str) -> BulkClient:
        if address not in self._clients:
            self._clients[address] = client = BulkClient(address, self._secret)
            if self._is_closed:
                client.close()
            client.start()
        return self._clients[address]


def group_layers(layers: Iterable[int], address_of: Callable[[int], str]) -> dict[str, list[int]]:
    """Layers by the address that each comes from."""
    found: dict[str, list[int]] = {}
    for layer in layers:
        found.setdefault(address_of(layer), []).append(layer)
    return found


def write_pool(pool: KVPool) -> Writer:
    """Writes blocks of a pool that are loading: no step reads them."""

    def write(layer: int, blocks: Sequence[int], data: ByteArray) -> bool:
        if not all(pool.is_backed(block) for block in blocks):
            return False
        words = torch.from_numpy(data.view(np.int32))
        pool.words[layer][torch.tensor(blocks, device=pool.words[layer].device)] = words.to(pool.words[layer].device)
        return True

    return write


def copy_own(memory: GroupMemory, one: RequestCopy, layers: Iterable[int], write: Writer) -> bool:
    """Copy the layers that a member has itself from its group memory; whether all are there."""
    for layer in layers:
        data = memory.read(layer, one.sources)
        if data is None or not write(layer, one.targets, data):
            return False
    return True
