"""Copies to a neighbour GPU and back, without a GPU: moved bytes, misses and waits.

The driver and the streams are fakes over this machine's memory; engine, slots, extents and the mover are the real ones.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import CopyTime, Direction, Location, Tier
from floodplain.memory.cuda import wires as cuda_wires
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.home import claim_cuda_home
from floodplain.memory.cuda.peer import CudaPeerMemory
from floodplain.memory.cuda.transfer import CudaTransferEngine
from floodplain.memory.cuda.wires import PeerWire, PinnedWire
from floodplain.memory.host.device import open_private_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.peer.slot_mover import SlotMover, SlotStore
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import BlockCopy, BlockStore, CopyResult
from tests.fakes.cuda_driver import FakeDriver, Gpu
from tests.fakes.cuda_stream import FakeStream
from tests.support.waiting import HANG_S

LAYOUT = KVLayout(num_layers=3, block_tokens=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
NUM_BLOCKS, CHUNK_SLOTS, NUM_CHUNKS, STAGING_BLOCKS = 16, 4, 3, 3
NUM_SLOTS = CHUNK_SLOTS * NUM_CHUNKS
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
HOME, NEIGHBOUR = b"h" * 16, b"n" * 16
STREAM = 7


class There:
    """A pool, slots on a neighbour and in host memory, and engines that copy between them."""

    def __init__(self, driver: FakeDriver, pool: KVPool, folder: Path) -> None:
        self.driver, self.pool = driver, pool
        self.memory = CudaPeerMemory(0, folder)
        self.peer, self.host = PeerSlots(LAYOUT, CHUNK_SLOTS, NUM_CHUNKS), SwapSlots(LAYOUT, NUM_SLOTS)
        self.streams: dict[Direction, FakeStream] = {}
        wire = PeerWire(self.peer, CudaDriver(0))

        def open_stream(direction: Direction, store: BlockStore) -> FakeStream:
            return FakeStream(direction, store, wire, STAGING_BLOCKS)

        def open_pool_stream(direction: Direction) -> FakeStream:
            return self.streams.setdefault(direction, open_stream(direction, pool))

        self.engine = CudaTransferEngine(pool, self.peer, open_pool_stream).start()
        store = SlotStore(self.host)
        engine = CudaTransferEngine(store, self.peer, lambda direction: open_stream(direction, store))
        self.mover = SlotMover(self.host, self.peer, engine).start()
        self._num_copies = 0

    def add(self, *chunks: int) -> None:
        for chunk in chunks:
            extent = self.memory.allocate("near", self.peer.chunk_bytes + self.memory.page_bytes - 1)
            assert extent is not None
            self.peer.add(chunk, extent)

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


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[There]:
    driver = FakeDriver(Gpu(HOME, peers={NEIGHBOUR}), Gpu(NEIGHBOUR)).install(monkeypatch)
    monkeypatch.setattr(cuda_wires, "_current_stream", lambda device: STREAM)
    with claim_cuda_home("near", NEIGHBOUR, tmp_path), open_private_device(2**22) as device:
        pool = KVPool(device, LAYOUT, NUM_BLOCKS)
        pool.grow(BlockLedger(0, 4, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        there = There(driver, pool, tmp_path)
        yield there
        there.close()
        pool.close()
    assert driver.is_idle


@pytest.mark.parametrize("seed", range(5))
def test_blocks_go_by_way_of_both_tiers_and_come_back_as_they_left(there: There, seed: int) -> None:
    random = Random(seed)
    there.add(*range(NUM_CHUNKS))
    there.fill(seed)
    blocks, peer, host, again = (random.sample(range(n), 8) for n in (NUM_BLOCKS, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS))
    left = there.read(blocks)
    assert there.copy(OUT, blocks, peer).is_whole
    assert there.relocate(peer, host, Tier.HOST) == []
    assert there.relocate(host, again, Tier.PEER) == []
    there.fill(seed + 100)
    assert there.copy(IN, blocks[::-1], again[::-1]).is_whole
    assert torch.equal(there.read(blocks), left)
    assert {stream for *_, stream in there.driver.copies} == {STREAM}
    assert there.mover.moved_bytes == dict.fromkeys((Tier.HOST, Tier.PEER), 8 * LAYOUT.block_bytes)


def test_adjacent_slots_travel_as_one_copy_within_a_chunk(there: There) -> None:
    there.add(0, 1)
    there.copy(OUT, [0, 5, 2], [2, 3, 4])
    assert [size // LAYOUT.block_bytes for _, _, size, _ in there.driver.copies] == [2, 1]
    assert there.engine.take_copy_times() == [CopyTime(Tier.PEER, OUT, 1, 3, 0.25)]
    assert there.engine.take_copy_times() == []


def test_damage_on_the_neighbour_is_a_miss(there: There) -> None:
    there.add(0)
    there.fill(0)
    assert there.copy(OUT, [0, 1], [0, 1]).is_whole
    ((address, _),) = there.peer.pieces(1, 1)
    ctypes.c_uint8.from_address(address + 5).value ^= 1
    assert there.copy(IN, [8, 9], [0, 1]).problem == "1 blocks have another digest"
    assert there.relocate([0, 1], [4, 5], Tier.HOST) == [1]
    assert (there.host.digests[4:6] != EMPTY_DIGEST).tolist() == [True, False]


def test_what_lay_in_a_chunk_that_is_gone_is_a_miss(there: There) -> None:
    there.add(0, 1)
    there.fill(0)
    slots = [3, 4]  # one in each chunk
    assert there.copy(OUT, [0, 1], slots).is_whole
    there.peer.remove(1)
    assert there.copy(IN, [5], [3]).is_whole
    assert there.copy(IN, [5, 6], slots).problem == "a slot holds no whole block"
    assert there.copy(IN, [6], [4]).problem == "a slot holds no whole block"
    assert there.copy(OUT, [2, 7], slots).problem == "a slot went away"
    assert there.relocate([3, 4], [0, 1], Tier.HOST) == [1]
    there.add(1)  # new memory under its number has no digests
    assert not there.copy(IN, [6], [4]).is_whole


@pytest.mark.parametrize("direction", [OUT, IN])
def test_removed_memory_waits_only_for_copies_that_use_it(there: There, direction: Direction) -> None:
    """Forced removal: no thread polls or steps."""
    there.add(0, 1)
    assert there.copy(OUT, [0, 1], [0, 4]).is_whole
    there.streams[direction].gate.clear()
    there.submit(direction, [0, 1], [0, 4])
    thread = there.remove_in_thread(0)
    other = there.submit(direction, [2, 3], [1, 5])  # queued behind the first; one of its slots has no memory
    thread.join(0.05)
    assert thread.is_alive()
    assert there.driver.gpus[1].num_used_pages == 2
    there.streams[direction].gate.set()
    thread.join(HANG_S)
    assert there.driver.gpus[1].num_used_pages == 1
    assert (there.peer.digests[:CHUNK_SLOTS] == EMPTY_DIGEST).all(), "what is gone has no digest any more"
    results = {}
    while there.engine.num_in_flight:
        results |= {result.transfer_id: result for result in there.engine.wait(HANG_S)}
    assert results[other - 1].is_whole
    assert not results[other].is_whole


def test_a_copy_in_waits_for_no_copy_out(there: There) -> None:
    there.add(0)
    there.copy(OUT, [0], [0])
    there.streams[OUT].gate.clear()
    there.submit(OUT, [1, 2], [1, 2])
    assert there.copy(IN, [3], [0]).is_whole
    assert there.engine.wait(0.01) == []
    assert there.engine.num_in_flight == 1
    there.streams[OUT].gate.set()
    (result,) = there.engine.wait()
    assert result.is_whole


def test_a_copy_that_fails_is_loud_ever_after_and_holds_no_memory(there: There) -> None:
    there.add(0)
    there.streams[OUT].failure = RuntimeError("the device is lost")
    there.submit(OUT, [0], [0])
    for call in (there.engine.wait, there.engine.poll, lambda: there.submit(IN, [0], [0])):
        with pytest.raises(InvariantError, match=r"a copy thread ended with RuntimeError.*the device is lost"):
            call()
    there.peer.remove(0)
    assert there.driver.gpus[1].num_used_pages == 0


def test_a_copy_that_fails_to_start_frees_its_memory_after_a_drain(there: There) -> None:
    there.add(0)
    there.streams[OUT].refusal = RuntimeError("half of it is there")
    with pytest.raises(RuntimeError, match="half of it"):
        there.submit(OUT, [0], [0])
    assert (there.streams[OUT].num_drained, there.engine.num_in_flight) == (1, 0)
    there.peer.remove(0)


def test_a_chunk_may_go_at_any_moment_of_a_copy(there: There) -> None:
    """Each block is whole or reported lost. A copy that touched unmapped memory would crash the process."""
    outcomes, random = set(), Random(1)
    for seed in range(120):
        there.add(*(chunk for chunk in range(NUM_CHUNKS) if chunk not in there.peer._extents))
        thread = threading.Thread(target=there.peer.remove, args=(random.randrange(NUM_CHUNKS),))
        blocks, slots = list(range(8)), random.sample(range(NUM_SLOTS), 8)
        there.fill(seed)
        left = there.read(blocks)
        if seed % 3 == 1:
            thread.start()
        lost_out = there.copy(OUT, blocks, slots).lost
        there.fill(seed + 1000)
        if seed % 3 == 2:
            thread.start()
        lost = there.copy(IN, blocks, slots).lost
        if seed % 3:
            thread.join()
        outcomes.add((not lost_out, not lost))
        assert seed % 3 or not lost
        assert set(lost_out) <= set(lost), "what did not leave does not come back"
        whole = [place for place in range(len(blocks)) if place not in lost]
        assert torch.equal(there.read(blocks)[whole], left[whole])
    assert outcomes & {(True, False), (False, False)}


def test_slots_that_are_not_page_locked_are_refused() -> None:
    with pytest.raises(InvariantError, match="page-locked"):
        PinnedWire(SwapSlots(LAYOUT, 1))
