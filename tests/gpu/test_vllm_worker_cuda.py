"""The worker side of the plug-in for vLLM on a GPU: blocks written by a kernel return bit by bit."""

from __future__ import annotations

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import Location, Tier
from floodplain.plugins.vllm.cache_blocks import CacheBlocks
from floodplain.plugins.vllm.messages import StepOrders
from floodplain.plugins.vllm.worker import SwapWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BLOCKS, HEADS, TOKENS, DIM, LAYERS = 64, 8, 16, 128, 4
SHAPES = {
    "K and V apart": (2, BLOCKS, TOKENS, HEADS, DIM),
    "K and V of a block together": (BLOCKS, 2, TOKENS, HEADS, DIM),
}


def order(number: int, kind: TransferKind, blocks: list[int], slots: list[int]) -> StepOrders:
    locations = tuple(Location(Tier.HOST, slot) for slot in slots)
    transfer = Transfer(number, kind, SeqId(0), tuple(map(BlockId, blocks)), locations, None)
    return StepOrders((transfer,), is_idle=True)


def finish(worker: SwapWorker, number: int) -> bool:
    """Whether the copy, once it has ended, is whole."""
    for _ in range(1000):
        worker.finish()
        ended = worker.take_report().ended
        if number in ended:
            return not ended[number][1]
    raise AssertionError("no copy ended")


def rows(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    return (cache[:, blocks] if cache.shape[0] == 2 else cache[blocks]).clone()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_leave_after_what_writes_them_and_come_back_elsewhere(shape: tuple[int, ...]) -> None:
    caches = {str(layer): torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for layer in range(LAYERS)}
    worker = SwapWorker(CacheBlocks(caches, BLOCKS), 40)
    left, back, slots = list(range(0, 60, 2)), list(range(1, 61, 2)), list(reversed(range(30)))
    torch.cuda._sleep(50_000_000)  # the step before is still computing when the copy is ordered
    for cache in caches.values():
        cache.normal_()
    worker.begin(order(0, TransferKind.SWAP_OUT, left, slots))
    assert finish(worker, 0)
    kept = {name: rows(cache, left) for name, cache in caches.items()}
    untouched = {name: rows(cache, [62, 63]) for name, cache in caches.items()}
    worker.begin(order(1, TransferKind.SWAP_IN, back, slots))
    assert finish(worker, 1)
    for name, cache in caches.items():
        assert bool(kept[name].any()) and torch.equal(rows(cache, back), kept[name])
        assert torch.equal(rows(cache, [62, 63]), untouched[name])
    worker.close()


def test_a_damaged_slot_is_a_copy_that_failed() -> None:
    cache = torch.randn((BLOCKS, 2, TOKENS, HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    worker = SwapWorker(CacheBlocks({"layer": cache}, BLOCKS), 4)
    worker.begin(order(0, TransferKind.SWAP_OUT, [5], [2]))
    assert finish(worker, 0)
    worker.slots.part(2, 1)[0, 0, 7] += 1
    worker.begin(order(1, TransferKind.SWAP_IN, [6], [2]))
    assert not finish(worker, 1)
    worker.close()


def test_blocks_that_begin_at_odd_places_are_refused() -> None:
    room = torch.zeros(BLOCKS * 1024 + 2, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UserError, match="whole 16 bytes"):
        SwapWorker(CacheBlocks({"layer": room[2:].view(BLOCKS, 2, TOKENS, 32)}, BLOCKS), 4)
