"""Slots on a neighbour's device: blocks return unchanged or are known to be lost, however chunks are removed.

The neighbour is a host device of the machine; its own thread removes chunks while copies are in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import Direction, Location, Tier
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.peer.memory import HostPeerMemory
from floodplain.memory.peer.slot_mover import HostSlotMover
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyResult
from tests.support.host_devices import open_device

LAYOUT = KVLayout(num_layers=3, block_tokens=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
NUM_BLOCKS, CHUNK_SLOTS, NUM_CHUNKS = 16, 4, 3
NUM_SLOTS = CHUNK_SLOTS * NUM_CHUNKS


class Neighbours:
    """A pool, slots on a neighbour and in host memory, and the engines that copy between them."""

    def __init__(self, folder: Path, own: HostDevice, neighbour: HostDevice) -> None:
        self.neighbour = neighbour
        self.pool = KVPool(own, LAYOUT, NUM_BLOCKS)
        self.pool.grow(BlockLedger(0, 4, quantum_blocks=self.pool.quantum_blocks), NUM_BLOCKS)
        self.memory = HostPeerMemory(folder)
        self.peer, self.host = PeerSlots(LAYOUT, CHUNK_SLOTS, NUM_CHUNKS), SwapSlots(LAYOUT, NUM_SLOTS)
        self.engine = HostTransferEngine(self.pool, self.peer).start()
        self.mover = HostSlotMover(self.host, self.peer).start()
        self._num_copies = 0

    def add(self, chunk: int) -> None:
        extent = self.memory.allocate("gpu1", self.peer.chunk_bytes + self.memory.page_bytes - 1)
        assert extent is not None
        with ExitStack() as on_failure:
            on_failure.callback(extent.close)
            self.peer.add(chunk, extent)
            on_failure.pop_all()

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for words in self.pool.words:
            words[:NUM_BLOCKS] = torch.randint(-(2**31), 2**31, (NUM_BLOCKS, words.shape[1]), generator=generator).int()

    def read(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([words[blocks] for words in self.pool.words], dim=1)

    def copy(self, direction: Direction, blocks: list[int], slots: list[int]) -> CopyResult:
        self._num_copies += 1
        self.engine.submit(self._num_copies, BlockCopy(direction, tuple(blocks), tuple(slots)))
        (result,) = self.engine.wait()
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

    def close(self) -> None:
        self.engine.close()
        self.mover.close()
        self.peer.close()
        self.pool.close()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Neighbours]:
    with open_private_device(2**22) as own, open_device("gpu1", 2**22, tmp_path) as neighbour:
        there = Neighbours(tmp_path, own, neighbour)
        yield there
        there.close()
        assert neighbour.num_free_pages() == neighbour.capacity_pages


@pytest.mark.parametrize("seed", range(5))
def test_blocks_go_by_way_of_both_tiers_and_come_back_as_they_left(there: Neighbours, seed: int) -> None:
    random = Random(seed)
    for chunk in range(NUM_CHUNKS):
        there.add(chunk)
    there.fill(seed)
    blocks, peer, host, again = (random.sample(range(n), 8) for n in (NUM_BLOCKS, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS))
    left = there.read(blocks)
    assert there.copy(Direction.OUTBOUND, blocks, peer).is_whole
    assert there.relocate(peer, host, Tier.HOST) == []
    assert there.relocate(host, again, Tier.PEER) == []
    there.fill(seed + 100)
    assert there.copy(Direction.INBOUND, blocks[::-1], again[::-1]).is_whole
    assert torch.equal(there.read(blocks), left)


def test_a_block_that_was_changed_in_its_slot_is_not_relocated(there: Neighbours) -> None:
    there.add(0)
    there.fill(0)
    assert there.copy(Direction.OUTBOUND, [0, 1], [0, 1]).is_whole
    there.peer.part(1, 1)[0, 0, 0] ^= 1
    assert there.relocate([0, 1], [0, 1], Tier.HOST) == [1]
    assert (there.host.digests[:2] != EMPTY_DIGEST).tolist() == [True, False]


def test_what_lay_in_a_chunk_that_is_gone_is_a_miss(there: Neighbours) -> None:
    there.add(0)
    there.add(1)
    there.fill(0)
    slots = [3, 4]  # one in each chunk
    assert there.copy(Direction.OUTBOUND, [0, 1], slots).is_whole
    there.peer.remove(1)
    there.peer.remove(1)
    assert there.copy(Direction.INBOUND, [5], [3]).is_whole
    assert there.copy(Direction.INBOUND, [5, 6], slots).problem == "a slot holds no whole block"
    assert there.copy(Direction.OUTBOUND, [2, 7], slots).problem == "a slot went away"
    assert there.relocate([3, 4], [0, 1], Tier.HOST) == [1]
    there.add(1)  # new memory under the same chunk number has no valid blocks
    assert not there.copy(Direction.INBOUND, [6], [4]).is_whole
    with pytest.raises(InvariantError, match="has memory already"):
        there.add(1)


def test_a_chunk_may_go_at_any_moment_of_a_copy(there: Neighbours) -> None:
    """Blocks are whole, or known not to be. No copy touches removed memory, which would crash the process."""
    outcomes, random = set(), Random(1)
    for seed in range(300):
        for chunk in range(NUM_CHUNKS):
            if chunk not in there.peer._extents:
                there.add(chunk)
        gone = random.sample(range(NUM_CHUNKS), NUM_CHUNKS)
        thread = threading.Thread(target=lambda gone=gone: [there.peer.remove(chunk) for chunk in gone])
        blocks, slots = list(range(8)), list(range(2, 10))
        there.fill(seed)
        left = there.read(blocks)
        if seed % 3 == 1:
            thread.start()
        lost_out = there.copy(Direction.OUTBOUND, blocks, slots).lost
        there.fill(seed + 1000)
        if seed % 3 == 2:
            thread.start()
        lost = there.copy(Direction.INBOUND, blocks, slots).lost
        if seed % 3:
            thread.join()
        outcomes.add((not lost_out, not lost))
        assert seed % 3 or not lost
        assert set(lost_out) <= set(lost), "what did not leave does not come back"
        whole = [place for place in range(len(blocks)) if place not in lost]
        assert torch.equal(there.read(blocks)[whole], left[whole])
    assert (True, True) in outcomes
    assert outcomes & {(True, False), (False, False)}


def test_a_chunk_in_use_keeps_its_memory_until_the_use_ends(there: Neighbours) -> None:
    """Otherwise a copy that has begun would access address 0 if the memory is removed then."""
    there.add(0)
    slots = np.array([1, 2])
    with there.peer.use(slots) as is_there:
        assert is_there.all()
        before = there.peer.addresses(slots)
        thread = threading.Thread(target=there.peer.remove, args=(0,))
        thread.start()
        while True:
            with there.peer.use(slots) as is_there_still:
                if not is_there_still.any():
                    break
        assert (there.peer.addresses(slots) == before).all()
        assert list(there.peer.pieces(1, 2)) == [(int(before[0]), 2)]
        assert thread.is_alive()
    thread.join()
    assert there.memory.num_owned_pages == {}


def test_addresses_are_those_of_the_parts(there: Neighbours) -> None:
    there.add(2)
    there.add(0)
    for slot in (0, 3, 8, 11):
        assert there.peer.addresses(np.array([slot]))[0] == there.peer.part(slot, 1).data_ptr()
    there.add(1)
    sizes = [(int(there.peer.addresses(np.array([slot]))[0]), count) for slot, count in ((2, 2), (4, 4), (8, 1))]
    assert list(there.peer.pieces(2, 7)) == sizes
    with pytest.raises(InvariantError, match="slots \\[12\\] of 12"):
        there.peer.check([0, 12])


def test_an_extent_that_is_too_small_is_no_chunk(there: Neighbours) -> None:
    extent = there.memory.allocate("gpu1", there.memory.page_bytes)
    assert extent is not None
    slots = PeerSlots(LAYOUT, extent.num_bytes // LAYOUT.block_bytes + 1, 1)
    with pytest.raises(InvariantError, match=r"an extent of \d+ bytes for a chunk of \d+"):
        slots.add(0, extent)
    extent.close()
