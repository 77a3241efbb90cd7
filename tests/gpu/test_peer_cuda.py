"""Borrowing on GPUs: memory on a neighbour (another GPU, or a second pool on the same one), copies there and back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import Direction, Location, Tier
from floodplain.memory.cuda.device import measure_context_bytes, open_cuda_device
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import CudaPeerMemory, claim_cuda_home, find_cuda_home
from floodplain.memory.cuda.transfer import PeerWire, open_copies
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.peer.slots import PeerSlots, SlotMover, SlotStore
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyResult

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYOUT = KVLayout(num_layers=3, block_tokens=16, num_kv_heads=3, head_dim=80, dtype=torch.bfloat16)
NUM_BLOCKS, CHUNK_SLOTS, NUM_CHUNKS, STAGING_BLOCKS = 96, 16, 4, 7
NUM_SLOTS = CHUNK_SLOTS * NUM_CHUNKS
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
SLACK_BYTES = 2**22
"""The driver's own tables."""
NEIGHBOURS = range(max(1, torch.cuda.device_count()))
"""The home device itself, and every other one."""


class There:
    """A pool on GPU 0, slots on a neighbour and in page-locked memory, and the engines that copy between them."""

    def __init__(self, pool: KVPool, producer: str, folder: Path) -> None:
        self.pool, self.producer = pool, producer
        self.memory = CudaPeerMemory(0, folder)
        self.peer, self.host = PeerSlots(LAYOUT, CHUNK_SLOTS, NUM_CHUNKS), SwapSlots(LAYOUT, NUM_SLOTS, is_pinned=True)
        self.engine = open_copies(pool, pool.device.torch_device, self.peer, STAGING_BLOCKS).start()
        relocations = open_copies(SlotStore(self.host), pool.device.torch_device, self.peer, STAGING_BLOCKS).start()
        self.mover = SlotMover(self.host, self.peer, relocations)
        self._num_copies = 0

    def add(self, *chunks: int) -> None:
        page_bytes = self.memory.page_bytes
        for chunk in chunks:
            extent = self.memory.allocate(self.producer, -(-self.peer.chunk_bytes // page_bytes) * page_bytes)
            assert extent is not None
            self.peer.add(chunk, extent)

    def fill(self) -> None:
        for words in self.pool.words:
            words[:NUM_BLOCKS].random_(-(2**31), 2**31)

    def read(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([words[blocks] for words in self.pool.words], dim=1).cpu()

    def submit(self, direction: Direction, blocks: list[int], slots: list[int]) -> int:
        self._num_copies += 1
        self.engine.submit(self._num_copies, BlockCopy(direction, tuple(blocks), tuple(slots)))
        return self._num_copies

    def drain(self) -> dict[int, CopyResult]:
        results = {}
        while self.engine.num_in_flight:
            results |= {result.transfer_id: result for result in self.engine.wait()}
        return results

    def copy(self, direction: Direction, blocks: list[int], slots: list[int]) -> CopyResult:
        number = self.submit(direction, blocks, slots)
        return self.drain()[number]

    def relocate(self, sources: list[int], targets: list[int], target: Tier) -> list[int]:
        source = Tier.HOST if target is Tier.PEER else Tier.PEER
        pairs = [Location(source, slot) for slot in sources], [Location(target, slot) for slot in targets]
        self.mover.submit(Relocation(1, tuple(pairs[0]), tuple(pairs[1])))
        while not (ended := self.mover.poll()):
            time.sleep(1e-4)
        return list(ended[0][1])

    def scribble(self, slot: int) -> None:
        """Overwrite a slot on the neighbour."""
        rows = torch.zeros((1, LAYOUT.num_layers, LAYOUT.layer_block_words), dtype=torch.int32, device="cuda")
        PeerWire(self.peer, CudaDriver(0)).copy(OUT, rows.random_(), slot)
        torch.cuda.synchronize()

    def close(self) -> None:
        self.mover.close()
        self.engine.close()
        self.peer.close()
        self.host.close()


@pytest.fixture(params=NEIGHBOURS)
def producer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield an engine that computes on GPU 0, or on another one that GPU 0 reaches."""
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("triton")
    index: int = request.param
    with claim_cuda_home(f"gpu{index}", CudaDriver(index).uuid, tmp_path):
        try:
            CudaPeerMemory(0, tmp_path)._find(f"gpu{index}")
        except UserError as error:
            pytest.skip(str(error))
        yield f"gpu{index}"


@pytest.fixture
def there(producer: str, tmp_path: Path) -> Iterator[There]:
    with open_cuda_device(0) as device:
        pool = KVPool(device, LAYOUT, NUM_BLOCKS)
        pool.grow(BlockLedger(0, 16, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        there = There(pool, producer, tmp_path)
        there.fill()
        yield there
        there.close()


def permuted(count: int, number: int) -> list[int]:
    return torch.randperm(count)[:number].tolist()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_an_extent_takes_its_bytes_of_the_producers_device_and_frees_them(producer: str, tmp_path: Path) -> None:
    index = int(producer.removeprefix("gpu"))
    memory = CudaPeerMemory(0, tmp_path)
    memory.allocate(producer, memory.page_bytes).close()  # type: ignore[union-attr]  # the first one costs more
    torch.cuda.synchronize(index)
    before, _ = torch.cuda.mem_get_info(index)
    extent = memory.allocate(producer, 2**26 + memory.page_bytes - 1)
    assert extent is not None
    assert extent.num_bytes == 2**26
    held, _ = torch.cuda.mem_get_info(index)
    assert 2**26 <= before - held <= 2**26 + SLACK_BYTES
    with pytest.raises(UserError, match="there is no device"):
        memory.allocate("unknown", 2**26)
    extent.close()
    extent.close()
    assert before - torch.cuda.mem_get_info(index)[0] <= SLACK_BYTES


def test_more_than_there_is_is_none(producer: str, tmp_path: Path) -> None:
    memory = CudaPeerMemory(0, tmp_path)
    _, total = torch.cuda.mem_get_info(int(producer.removeprefix("gpu")))
    assert memory.allocate(producer, 2 * total) is None


def test_a_context_of_another_process_has_a_price() -> None:
    num_bytes = measure_context_bytes(0)
    print(f"a bare context takes {num_bytes >> 20} MiB")
    assert 2**20 <= num_bytes <= 2**31


# -- copies ------------------------------------------------------------------------------------------------------------


def test_blocks_go_by_way_of_both_tiers_and_come_back_as_they_left(there: There) -> None:
    there.add(*range(NUM_CHUNKS))
    blocks, peer, host, again = (permuted(n, 40) for n in (NUM_BLOCKS, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS))
    left = there.read(blocks)
    result = there.copy(OUT, blocks, peer)
    rows = left.reshape(len(blocks), -1).numpy()
    assert result.digests == tuple(compute_digests(rows, compute_weights(rows.shape[1])).tolist())
    assert there.relocate(peer, host, Tier.HOST) == []
    assert torch.equal(there.host.words[host], left)
    assert there.relocate(host, again, Tier.PEER) == []
    there.fill()
    assert there.copy(IN, blocks[::-1], again[::-1]).is_whole
    assert torch.equal(there.read(blocks), left)
    uses = there.engine.take_copy_times()
    assert len(uses) == 2
    assert all(use.duration_s > 0 for use in uses)


def test_damage_in_either_tier_is_a_miss(there: There) -> None:
    there.add(0)
    assert there.copy(OUT, [0, 1, 2], [0, 1, 2]).is_whole
    there.scribble(1)
    assert there.copy(IN, [8, 9, 10], [0, 1, 2]).problem == "1 blocks have another digest"
    assert there.relocate([0, 1, 2], [3, 4, 5], Tier.HOST) == [1]
    assert (there.host.digests[3:6] != EMPTY_DIGEST).tolist() == [True, False, True]
    there.host.words[5, 0, 0] ^= 1
    assert there.relocate([3, 5], [10, 11], Tier.PEER) == [1]
    assert not there.copy(IN, [9], [11]).is_whole


def test_slots_of_a_chunk_that_is_gone_are_a_miss(there: There) -> None:
    there.add(0, 1)
    slots = [CHUNK_SLOTS - 1, CHUNK_SLOTS]
    assert there.copy(OUT, [0, 1], slots).is_whole
    there.peer.remove(1)
    assert there.copy(IN, [5], slots[:1]).is_whole
    assert there.copy(IN, [6], slots[1:]).problem == "a slot holds no whole block"
    assert there.copy(OUT, [2, 7], slots).problem == "a slot went away"


@pytest.mark.parametrize("direction", [OUT, IN])
def test_removed_memory_waits_only_for_copies_that_use_it(there: There, direction: Direction) -> None:
    """The forced path: the copy is queued behind a kernel, and no thread polls."""
    there.add(0, 1)
    for warm_up in (OUT, IN):  # compiles the kernels, which takes longer than any sleep
        assert there.copy(warm_up, [0, 1], [0, CHUNK_SLOTS]).is_whole
    left = there.read([0, 1])
    torch.cuda._sleep(1_000_000_000)
    number = there.submit(direction, [0, 1], [0, CHUNK_SLOTS])
    thread = threading.Thread(target=there.peer.remove, args=(0,))
    thread.start()
    is_there = True
    while is_there:
        with there.peer.use(np.array([0])) as found:
            is_there = bool(found.any())
    assert thread.is_alive(), "the copy has not run yet"
    thread.join(20.0)
    assert not thread.is_alive()
    assert there.drain()[number].is_whole
    assert torch.equal(there.read([0, 1]), left)
    assert not there.copy(IN, [5], [0]).is_whole


def test_chunks_go_at_any_moment_of_many_copies(there: There) -> None:
    outcomes = set()
    for turn in range(60):
        there.add(*(chunk for chunk in range(NUM_CHUNKS) if chunk not in there.peer._extents))
        threads = [threading.Thread(target=there.peer.remove, args=(chunk,)) for chunk in permuted(NUM_CHUNKS, 2)]
        blocks, slots = permuted(NUM_BLOCKS, 40), permuted(NUM_SLOTS, 40)
        left = there.read(blocks)
        there.submit(OUT, blocks, slots)
        if turn % 3 == 1:
            [thread.start() for thread in threads]
        is_out = all(result.is_whole for result in there.drain().values())
        there.fill()
        there.submit(IN, blocks, slots)
        if turn % 3 == 2:
            [thread.start() for thread in threads]
        is_back = all(result.is_whole for result in there.drain().values())
        if turn % 3:
            [thread.join() for thread in threads]
        outcomes.add((turn % 3 == 0, is_out and is_back))
        assert not is_back or torch.equal(there.read(blocks), left)
    assert (True, True) in outcomes
    assert (True, False) not in outcomes


# -- processes ---------------------------------------------------------------------------------------------------------

PRODUCER = """
import sys
from pathlib import Path
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import claim_cuda_home
home = claim_cuda_home("lender", CudaDriver(0).uuid, Path(sys.argv[1]))
print("there", flush=True)
sys.stdin.read()
"""

CONSUMER = """
import sys
from pathlib import Path
from floodplain.memory.cuda.peer import CudaPeerMemory
extent = CudaPeerMemory(0, Path(sys.argv[1])).allocate("lender", 2**28)
print("there" if extent else "no room", flush=True)
sys.stdin.read()
"""


def start(program: str, folder: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdin=-1, stdout=-1)
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    return child


def test_a_neighbour_in_another_process_is_found_and_known_to_be_gone(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    memory = CudaPeerMemory(0, tmp_path)
    with start(PRODUCER, tmp_path) as child:
        extent = memory.allocate("lender", 2**24)
        assert extent is not None
        child.kill()
        child.wait()
        with pytest.raises(UserError, match="does not run any more"):
            memory.allocate("lender", 2**24)
        words = extent.tensor(torch.int32, (2**22,))
        words.fill_(7)  # its memory was never part of the producer's
        assert int(words.sum()) == 7 * 2**22
        extent.close()


def test_memory_of_a_consumer_that_is_killed_returns_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    before, _ = torch.cuda.mem_get_info(0)
    with claim_cuda_home("lender", CudaDriver(0).uuid, tmp_path):
        assert find_cuda_home("lender", tmp_path) == CudaDriver(0).uuid
        with start(CONSUMER, tmp_path) as child:
            held, _ = torch.cuda.mem_get_info(0)
            assert before - held >= 2**28
            child.kill()
            child.wait()
        end_s = time.monotonic() + 20.0
        while torch.cuda.mem_get_info(0)[0] < before - 2**24:
            assert time.monotonic() < end_s, "the memory of a dead process stays taken"
            time.sleep(0.01)
