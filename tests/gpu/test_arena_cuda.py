"""The CUDA arena and pool: the laws of the host's, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.memory.cuda.device import CudaDevice, open_cuda_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    pytest.importorskip("cuda.bindings")
    with open_cuda_device(0, max_bytes=2**28) as device:
        yield device


def test_a_page_passes_between_arenas_with_its_bytes(device: CudaDevice) -> None:
    one, other = device.reserve(8), device.reserve(8)
    first, second = (arena.tensor(torch.int32, (8, device.page_bytes // 4)) for arena in (one, other))
    pages = device.allocate(4)
    assert pages is not None
    one.map(2, pages)
    first[2:6] = torch.arange(4, device=first.device, dtype=torch.int32)[:, None]
    taken = one.unmap(3, 2)
    assert taken == pages[1:3]
    other.map(6, taken[::-1])
    assert second[6:].unique(dim=1).flatten().tolist() == [2, 1]
    assert first[[2, 5]].unique(dim=1).flatten().tolist() == [0, 3]


def test_mistakes_are_refused(device: CudaDevice) -> None:
    arena = device.reserve(4)
    pages = device.allocate(2)
    assert pages is not None
    arena.map(1, pages)
    for first, count in ((0, 2), (3, 1), (3, 2)):
        with pytest.raises(InvariantError):
            arena.unmap(first, count)
    with pytest.raises(InvariantError):
        arena.map(2, pages)


def test_a_budget_refuses_and_keeps_nothing(device: CudaDevice) -> None:
    num_pages = 2**28 // device.page_bytes
    assert device.allocate(num_pages + 1) is None
    assert device.num_owned_pages == 0
    assert device.num_free_pages() <= num_pages


def test_shrinking_keeps_blocks_and_gives_memory_back(device: CudaDevice) -> None:
    pool = KVPool(device, LAYOUT, 256)
    ledger = BlockLedger(0, 16, quantum_blocks=pool.quantum_blocks)
    assert pool.grow(ledger, 256) is not None
    blocks = ledger.allocate(256)
    assert blocks is not None
    for words in pool.words:
        words.copy_(torch.arange(256, device=words.device, dtype=torch.int32)[:, None].expand_as(words))
    ledger.free([block for block in blocks if block % 16])
    kept = [block for block in blocks if block % 16 == 0]
    before, _ = torch.cuda.mem_get_info()
    shrunk = pool.shrink(ledger, 0)
    assert pool.num_blocks == pool.quantum_blocks
    for block in kept:
        at = shrunk.moved.get(block, block)
        assert all((words[at] == block).all() for words in pool.words)
    device.release(shrunk.pages)
    after, _ = torch.cuda.mem_get_info()
    assert after - before >= len(shrunk.pages) * device.page_bytes
    assert device.num_owned_pages == pool.num_mapped_pages


def test_nothing_leaks_in_ten_thousand_cycles(device: CudaDevice) -> None:
    arena = device.reserve(4)
    view = arena.tensor(torch.uint8, (4, device.page_bytes))
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for step in range(10_000):
        pages = device.allocate(1)
        assert pages is not None
        arena.map(step % 4, pages)
        view[step % 4, :8] = step % 251
        device.release(arena.unmap(step % 4, 1))
    after, _ = torch.cuda.mem_get_info()
    assert before - after <= 2 * device.page_bytes
    assert device.num_owned_pages == 0


def test_what_others_hold_is_seen_and_its_own_is_not(device: CudaDevice) -> None:
    assert device.allocate(2) is not None
    assert device.num_foreign_pages() == 0
    with open_cuda_device(0, max_bytes=2**28) as neighbour:  # another owner, in the same context
        assert neighbour.allocate(3) is not None
        assert device.num_foreign_pages() == 3
    assert device.num_foreign_pages() == 0
