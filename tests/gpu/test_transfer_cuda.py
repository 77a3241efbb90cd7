"""Transfers on a GPU: Triton's digests equal the host's, and blocks return unchanged beside running kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction
from floodplain.memory.cuda.device import open_cuda_device
from floodplain.memory.cuda.transfer import CudaTransferEngine, open_copies
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyResult

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYOUT = KVLayout(num_layers=3, block_tokens=16, num_kv_heads=3, head_dim=80, dtype=torch.bfloat16)
NUM_BLOCKS, NUM_SLOTS = 96, 64
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
Bench = tuple[KVPool, SwapSlots, CudaTransferEngine]


@pytest.fixture
def bench() -> Iterator[Bench]:
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("triton")
    with open_cuda_device(0) as device:
        pool = KVPool(device, LAYOUT, NUM_BLOCKS)
        pool.grow(BlockLedger(0, 16, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        for words in pool.words:
            words[:NUM_BLOCKS].random_(-(2**31), 2**31)
        slots = SwapSlots(LAYOUT, NUM_SLOTS, is_pinned=True)
        engine = open_copies(pool, device.torch_device, slots, staging_blocks=7).start()
        yield pool, slots, engine
        engine.close()
        slots.close()


def _drain(engine: CudaTransferEngine) -> list[CopyResult]:
    results = []
    while engine.num_in_flight:
        results += engine.wait()
    return results


def _read(pool: KVPool, blocks: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([words[list(blocks)] for words in pool.words], dim=1).cpu()


def test_digests_are_those_of_the_definition(bench: Bench) -> None:
    pool, slots, engine = bench
    blocks = tuple(torch.randperm(NUM_BLOCKS)[:NUM_SLOTS].tolist())
    homes = tuple(torch.randperm(NUM_SLOTS).tolist())
    engine.submit(1, BlockCopy(OUT, blocks, homes))
    (result,) = _drain(engine)
    words = _read(pool, blocks)
    assert torch.equal(slots.words[list(homes)], words)
    rows = words.reshape(len(blocks), -1).numpy()
    assert result.digests == tuple(compute_digests(rows, compute_weights(rows.shape[1])).tolist())


def test_blocks_return_as_they_left_and_damage_is_refused(bench: Bench) -> None:
    pool, slots, engine = bench
    blocks, homes, back = tuple(range(0, 60, 2)), tuple(range(30)), tuple(range(60, 90))
    left = _read(pool, blocks)
    engine.submit(1, BlockCopy(OUT, blocks, homes))
    assert all(result.is_whole for result in _drain(engine))
    engine.submit(2, BlockCopy(IN, back, homes))
    assert all(result.is_whole for result in _drain(engine))
    assert torch.equal(_read(pool, back), left)
    slots.words[17, 1, 33] ^= 4
    engine.submit(3, BlockCopy(IN, back, homes))
    (result,) = _drain(engine)
    assert result.problem == "1 blocks have another digest"


def test_an_outbound_copy_sees_what_earlier_kernels_wrote(bench: Bench) -> None:
    pool, slots, engine = bench
    engine.submit(0, BlockCopy(OUT, (0,), (0,)))  # compiles the kernels, which takes longer than any sleep
    _drain(engine)
    torch.cuda._sleep(500_000_000)
    for words in pool.words:
        words[:NUM_BLOCKS] = 77
    engine.submit(1, BlockCopy(OUT, tuple(range(NUM_SLOTS)), tuple(range(NUM_SLOTS))))
    assert engine.poll() == []
    assert all(result.is_whole for result in _drain(engine))
    assert (slots.words == 77).all()


def test_many_copies_share_staging_without_mixing(bench: Bench) -> None:
    pool, slots, engine = bench
    for transfer_id in range(NUM_SLOTS):
        engine.submit(transfer_id, BlockCopy(OUT, (transfer_id,), (transfer_id,)))
    assert {result.transfer_id for result in _drain(engine)} == set(range(NUM_SLOTS))
    assert torch.equal(slots.words, _read(pool, tuple(range(NUM_SLOTS))))


def test_a_layer_in_page_locked_memory_is_copied_from_there_and_back(bench: Bench) -> None:
    pool, slots, engine = bench
    blocks, back = tuple(range(8)), tuple(range(20, 28))
    left = _read(pool, blocks)
    copy = torch.zeros(pool.words[1].shape, dtype=torch.int32, pin_memory=True)
    copy[:NUM_BLOCKS] = pool.words[1][:NUM_BLOCKS].cpu()
    pool.place_layer(1, copy)
    pool.device.release(pool.unmap_layers([1]))
    for direction, own in ((OUT, blocks), (IN, back)):
        engine.submit(1, BlockCopy(direction, own, blocks))
        assert all(result.is_whole for result in _drain(engine))
    assert torch.equal(slots.words[:8], left)
    assert torch.equal(copy[list(back)], left[:, 1])


def test_slots_that_are_not_page_locked_are_refused(bench: Bench) -> None:
    with pytest.raises(InvariantError, match="page-locked"):
        open_copies(bench[0], bench[0].device.torch_device, SwapSlots(LAYOUT, 1), 1)
