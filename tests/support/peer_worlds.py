"""A pool, slots on a neighbour and in host memory, and engines that copy between them: on the host, or on fake GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import Relocation
from floodplain.core.tiers import Direction, Location, Tier
from floodplain.memory.cuda import transfer as cuda_wires
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import CudaPeerMemory, claim_cuda_home
from floodplain.memory.cuda.transfer import Batch, CudaTransferEngine, PeerWire, Wire
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.peer.memory import HostPeerMemory
from floodplain.memory.peer.slots import PeerSlots, SlotMover, SlotStore
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockCopy, BlockStore, CopyEngine, CopyResult
from tests.fakes.cuda_driver import FakeDriver, Gpu
from tests.support.host_devices import open_device
from tests.support.waiting import HANG_S

# -- a stream without a GPU --------------------------------------------------------------------------------------------


class FakeStream:
    """A ``CudaStream``. Its work runs when a caller waits for it, once ``gate`` is open.

    Attributes:
        gate: Open at first.
        num_under_way: Copies on the stream that have not ended.
        failure: Raised by calls that wait.
        refusal: Raised by ``run``.
        num_drained: Number of ``drain`` calls.
    """

    def __init__(self, direction: Direction, store: BlockStore, wire: Wire, staging_blocks: int) -> None:
        self.staging_blocks = staging_blocks
        self.gate = threading.Event()
        self.gate.set()
        self.num_under_way = self.num_drained = 0
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self._direction, self._words, self._wire = direction, store.words, wire
        num_words = sum(words.shape[1] for words in store.words)
        self._weights = compute_weights(num_words)
        self._staging = torch.empty((staging_blocks, num_words), dtype=torch.int32)

    def run(self, batches: Sequence[Batch]) -> FakeMark:
        if self.refusal is not None:
            raise self.refusal
        self.num_under_way += 1
        return FakeMark(self, batches)

    def drain(self) -> None:
        self.num_drained += 1

    def close(self) -> None:
        assert not self.num_under_way

    def finish(self, batches: Sequence[Batch]) -> np.ndarray:
        """Run the copies; return their digests."""
        assert self.gate.wait(HANG_S), "the copies were never allowed to run"
        self.num_under_way -= 1
        if self.failure is not None:
            raise self.failure
        return np.concatenate([self._run(batch) for batch in batches])

    def _run(self, batch: Batch) -> np.ndarray:
        staging = self._staging[: len(batch.order)]
        if self._direction is Direction.OUTBOUND:
            staging[:] = torch.cat([words[batch.blocks] for words in self._words], dim=1)
        for row, slot, count in batch.runs:
            self._wire.copy(self._direction, staging[row : row + count], slot)
        if self._direction is Direction.INBOUND:
            parts = staging.split([words.shape[1] for words in self._words], dim=1)
            for words, part in zip(self._words, parts, strict=True):
                words[batch.blocks] = part
        return compute_digests(staging.numpy(), self._weights)


class FakeMark:
    """A ``CudaMark``."""

    def __init__(self, stream: FakeStream, batches: Sequence[Batch]) -> None:
        self._stream, self._batches = stream, batches

    def wait(self) -> tuple[np.ndarray, float]:
        return self._stream.finish(self._batches), 0.25


LAYOUT = KVLayout(num_layers=3, block_tokens=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
NUM_BLOCKS, CHUNK_SLOTS, NUM_CHUNKS, STAGING_BLOCKS = 16, 4, 3, 3
NUM_SLOTS = CHUNK_SLOTS * NUM_CHUNKS
NEIGHBOUR = "near"
STREAM = 7
"""The stream of the model, in which copies begin on fake GPUs."""
_HOME_UUID, _NEIGHBOUR_UUID = b"h" * 16, b"n" * 16


class PeerWorld:
    """Chunks of the neighbour's memory are added and removed by the test."""

    memory: HostPeerMemory | CudaPeerMemory
    engine: CopyEngine[Any]
    mover: SlotMover

    def __init__(self, own: HostDevice) -> None:
        self.pool = KVPool(own, LAYOUT, NUM_BLOCKS)
        self.pool.grow(BlockLedger(0, 4, quantum_blocks=self.pool.quantum_blocks), NUM_BLOCKS)
        self.peer, self.host = PeerSlots(LAYOUT, CHUNK_SLOTS, NUM_CHUNKS), SwapSlots(LAYOUT, NUM_SLOTS)
        self._num_copies = 0

    def add(self, *chunks: int) -> None:
        for chunk in chunks:
            extent = self.memory.allocate(NEIGHBOUR, self.peer.chunk_bytes + self.memory.page_bytes - 1)
            assert extent is not None
            try:
                self.peer.add(chunk, extent)
            except BaseException:
                extent.close()
                raise

    def add_missing(self) -> None:
        """Add all chunks that have no memory."""
        self.add(*(chunk for chunk in range(NUM_CHUNKS) if chunk not in self.peer._extents))

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for words in self.pool.words:
            words[:NUM_BLOCKS] = torch.randint(-(2**31), 2**31, (NUM_BLOCKS, words.shape[1]), generator=generator).int()

    def read(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([words[blocks] for words in self.pool.words], dim=1)

    def submit(self, direction: Direction, blocks: list[int], slots: list[int]) -> int:
        self._num_copies += 1
        self.engine.submit(self._num_copies, BlockCopy(direction, tuple(blocks), tuple(slots)))
        return self._num_copies

    def copy(self, direction: Direction, blocks: list[int], slots: list[int]) -> CopyResult:
        number = self.submit(direction, blocks, slots)
        (result,) = self.engine.wait(HANG_S)
        assert result.transfer_id == number
        return result

    def relocate(self, sources: list[int], targets: list[int], target: Tier) -> list[int]:
        """Move slots of the other tier to ``target``; return the places of lost ones."""
        self._num_copies += 1
        source = Tier.HOST if target is Tier.PEER else Tier.PEER
        pairs = [Location(source, slot) for slot in sources], [Location(target, slot) for slot in targets]
        self.mover.submit(Relocation(self._num_copies, tuple(pairs[0]), tuple(pairs[1])))
        while not (ended := self.mover.poll()):
            pass
        assert [relocation_id for relocation_id, _ in ended] == [self._num_copies]
        return list(ended[0][1])

    def remove_in_thread(self, chunk: int) -> threading.Thread:
        """Remove a chunk in a thread; return once no new copy finds it."""
        thread = threading.Thread(target=self.peer.remove, args=(chunk,))
        thread.start()
        is_there = True
        while is_there:
            with self.peer.use(np.array([chunk * CHUNK_SLOTS])) as found:
                is_there = bool(found.any())
        return thread

    def close(self) -> None:
        self.mover.close()
        self.engine.close()
        self.peer.close()
        self.pool.close()


class FakeCudaWorld(PeerWorld):
    """Driver and streams are fakes over this machine's memory; engines, slots and extents are the product's."""

    def __init__(self, own: HostDevice, folder: Path, driver: FakeDriver) -> None:
        super().__init__(own)
        self.driver, self.memory = driver, CudaPeerMemory(0, folder)
        self.streams: dict[Direction, FakeStream] = {}
        wire = PeerWire(self.peer, CudaDriver(0))

        def open_stream(direction: Direction, store: BlockStore) -> FakeStream:
            return FakeStream(direction, store, wire, STAGING_BLOCKS)

        def open_pool_stream(direction: Direction) -> FakeStream:
            return self.streams.setdefault(direction, open_stream(direction, self.pool))

        self.engine = self.cuda_engine = CudaTransferEngine(self.pool, self.peer, open_pool_stream).start()
        store = SlotStore(self.host)
        engine = CudaTransferEngine(store, self.peer, lambda direction: open_stream(direction, store)).start()
        self.mover = SlotMover(self.host, self.peer, engine)


@contextmanager
def host_world(folder: Path) -> Iterator[PeerWorld]:
    """The neighbour is a host device; no memory of it stays taken."""
    with open_private_device(2**22) as own, open_device(NEIGHBOUR, 2**22, folder) as neighbour:
        there = PeerWorld(own)
        there.memory = HostPeerMemory(folder)
        there.engine = HostTransferEngine(there.pool, there.peer).start()
        copies = HostTransferEngine(SlotStore(there.host), there.peer).start()
        there.mover = SlotMover(there.host, there.peer, copies)
        yield there
        there.close()
        assert neighbour.num_free_pages() == neighbour.capacity_pages


@contextmanager
def fake_cuda_world(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FakeCudaWorld]:
    """The neighbour is a fake GPU; no memory of it stays taken."""
    driver = FakeDriver(Gpu(_HOME_UUID, peers={_NEIGHBOUR_UUID}), Gpu(_NEIGHBOUR_UUID)).install(patch)
    patch.setattr(cuda_wires, "_current_stream", lambda device: STREAM)
    with claim_cuda_home(NEIGHBOUR, _NEIGHBOUR_UUID, folder), open_private_device(2**22) as own:
        there = FakeCudaWorld(own, folder, driver)
        yield there
        there.close()
    assert driver.is_idle
