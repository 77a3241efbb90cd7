"""The vLLM plug-in's worker side: in any cache layout, blocks return bit for bit, or the copy fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import CopyTime, Direction, Location, Tier
from floodplain.plugins.vllm.cache_blocks import CacheBlocks
from floodplain.plugins.vllm.messages import COPY, StepOrders, WorkerReport
from floodplain.plugins.vllm.worker import SwapWorker

NONE: frozenset[int] = frozenset()
"""No block is lost."""
BLOCKS, HEADS, TOKENS, DIM = 6, 2, 4, 8
SIZE = HEADS * TOKENS * DIM


def together(seed: int) -> torch.Tensor:
    """K and V of a block side by side: [blocks, 2 * heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((BLOCKS, 2 * HEADS, TOKENS, DIM), generator=generator).to(torch.bfloat16)


def apart(seed: int) -> torch.Tensor:
    """All K in front of all V: [2, blocks, heads, tokens, dim]."""
    return together(seed).reshape(2, BLOCKS, HEADS, TOKENS, DIM)


def permuted(seed: int) -> torch.Tensor:
    """Tokens in front of heads in memory, but not in the shape."""
    whole = together(seed)
    return whole.as_strided(whole.shape, (2 * SIZE, DIM, 2 * HEADS * DIM, 1))


def in_a_larger_one(seed: int) -> torch.Tensor:
    """A cache at an offset into its memory."""
    room = torch.zeros((BLOCKS + 1, 2 * HEADS, TOKENS, DIM), dtype=torch.bfloat16)
    room[1:] = together(seed)
    return room[1:]


SHAPES = [together, apart, permuted, in_a_larger_one]


def part_of(cache: torch.Tensor, block: int) -> torch.Tensor:
    """A block of one layer."""
    return (cache[:, block] if cache.shape[0] == 2 else cache[block]).clone()


def fill(cache: torch.Tensor, block: int) -> None:
    (cache[:, block] if cache.shape[0] == 2 else cache[block]).fill_(-1)


def order_copy(number: int, kind: TransferKind, blocks: Sequence[int], slots: Sequence[int]) -> StepOrders:
    """One copy, in a step that computes nothing."""
    locations = tuple(Location(Tier.HOST, slot) for slot in slots)
    ids = tuple(BlockId(block) for block in blocks)
    return StepOrders((Transfer(number, kind, SeqId(0), ids, locations, None),), is_idle=True)


def finish(worker: SwapWorker) -> tuple[set[str], set[str], WorkerReport]:
    """Poll until a copy has ended; a poll in an idle step waits for one."""
    for _ in range(1000):
        arrived, failed = worker.finish()
        report = worker.take_report()
        if report.ended:
            return arrived, failed, report
    raise AssertionError("no copy ended")


def make_worker(caches: dict[str, torch.Tensor], num_slots: int = 8) -> SwapWorker:
    return SwapWorker(CacheBlocks(caches, BLOCKS), num_slots)


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return {f"layer.{seed}": together(seed) for seed in range(3)}


@pytest.fixture
def worker(caches: dict[str, torch.Tensor]) -> Iterator[SwapWorker]:
    worker = make_worker(caches)
    yield worker
    worker.close()


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SHAPES)
def test_swapped_blocks_return_in_other_blocks_bit_by_bit(make: Callable[[int], torch.Tensor]) -> None:
    caches = {str(seed): make(seed) for seed in range(3)}
    kept = {name: [part_of(cache, block) for block in range(BLOCKS)] for name, cache in caches.items()}
    worker = make_worker(caches)
    worker.begin(order_copy(0, TransferKind.SWAP_OUT, [1, 4], [5, 0]))
    assert finish(worker)[2].ended == {0: (1, NONE)}
    for cache in caches.values():
        fill(cache, 1)
        fill(cache, 4)
    worker.begin(order_copy(1, TransferKind.SWAP_IN, [3, 2], [5, 0]))
    assert finish(worker)[2].ended == {1: (1, NONE)}
    worker.close()
    for name, cache in caches.items():
        for block, source in ((0, 0), (3, 1), (2, 4), (5, 5)):
            assert torch.equal(part_of(cache, block), kept[name][source]), "and no other block was touched"
        assert bool((part_of(cache, 1) == -1).all()) and bool((part_of(cache, 4) == -1).all())


@pytest.mark.parametrize("make", SHAPES)
def test_a_slot_has_room_for_a_block_of_all_layers(make: Callable[[int], torch.Tensor]) -> None:
    layout = CacheBlocks({str(seed): make(seed) for seed in range(3)}, BLOCKS).layout
    assert layout.block_bytes == 3 * 2 * SIZE * 2
    assert layout.num_layers == (6 if make is apart else 3), "K and V that lie apart are two parts"


def test_caches_are_seen_and_not_copied() -> None:
    cache = permuted(0)
    words = CacheBlocks({"0": cache}, BLOCKS).words[0]
    cache[2, 1, 3, 5] = 42.0
    assert words.data_ptr() == cache.data_ptr()
    assert bool((words[2].view(torch.bfloat16) == 42.0).any())


@pytest.mark.parametrize(
    ("cache", "line"),
    [
        (together(0)[:4], r"layer has a KV cache of shape \(4, 4, 4, 8\), in which 6 blocks are not found"),
        (together(0).reshape(3, 2, -1), "in which 6 blocks are not found"),
        (together(0).reshape(4, BLOCKS, -1), "in which 6 blocks are not found"),
        (
            torch.zeros(BLOCKS, 2, 64)[:, :, ::2],
            r"layer has the unsupported strides \(128, 64, 2\) for .* LBNHC and BLNHC",
        ),
        (together(0).transpose(0, 1).contiguous().transpose(0, 1), "unsupported strides"),
        (together(0)[..., : DIM // 2], "unsupported strides"),
        (torch.zeros(1, 4, 8).expand(BLOCKS, 4, 8), "unsupported strides"),
        (torch.zeros(BLOCKS, 1, 8).expand(BLOCKS, 4, 8), "unsupported strides"),
        (torch.zeros(BLOCKS * 64).as_strided((BLOCKS, 4, 8), (32, 16, 1)), "unsupported strides"),
        (torch.zeros((BLOCKS, 3, 1), dtype=torch.bfloat16), "unsupported strides"),  # no whole number of words
        (torch.zeros((BLOCKS, 4, 8), device="meta"), "one CPU or NVIDIA GPU per worker, not from meta"),
        (torch.zeros(BLOCKS * 32 + 1, dtype=torch.bfloat16)[1:].view(BLOCKS, 4, 8), "strides"),  # at an odd address
    ],
)
def test_a_cache_in_which_a_block_is_no_piece_of_memory_is_refused(cache: torch.Tensor, line: str) -> None:
    with pytest.raises(UserError, match=line):
        CacheBlocks({"layer": cache}, BLOCKS)


@pytest.mark.parametrize(
    ("caches", "num_bytes"),
    [
        ({"layer": torch.zeros(BLOCKS * 64 + 2, dtype=torch.bfloat16)[2:].view(BLOCKS, 2, TOKENS, -1)}, 16),
        ({"layer": torch.zeros((BLOCKS, 2, TOKENS, 1))}, 64),
    ],
    ids=["they begin between pieces", "they end between pieces"],
)
def test_blocks_that_are_no_whole_pieces_of_a_devices_copies_are_refused(
    caches: dict[str, torch.Tensor], num_bytes: int
) -> None:
    blocks = CacheBlocks(caches, BLOCKS)
    with pytest.raises(UserError, match=f"do not begin at whole {num_bytes} bytes"):
        blocks.expect_pieces(num_bytes)
    blocks.expect_pieces(4)
    SwapWorker(blocks, 1).close()  # a CPU copies any


def laid_out(order: str, *, pad: int = 0, num_layers: int = 3) -> dict[str, torch.Tensor]:
    """Caches of layers [blocks, heads, tokens, K and V] over memory in vLLM's order of (L, B, H, N, C)."""
    sizes = {"L": num_layers, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    outer, inner = sizes[order[0]], [sizes[one] for one in order[1:]]
    row = torch.Size(inner).numel()
    generator = torch.Generator().manual_seed(3)
    memory = torch.randn((outer, row + pad), generator=generator)[:, :row].unflatten(1, inner)
    whole = memory.permute([order.index(one) for one in "LBHNC"])
    return {f"layer.{number}": whole[number] for number in range(num_layers)}


@pytest.mark.parametrize(
    ("order", "pad", "num_pieces"),
    [("LBHNC", 0, 3), ("LBNHC", 0, 3), ("BLHNC", 0, 1), ("BLNHC", 0, 1), ("BHLNC", 0, 1), ("BLNHC", 8, 1)],
)
def test_blocks_come_back_in_every_layout_in_as_few_pieces_as_it_has(order: str, pad: int, num_pieces: int) -> None:
    caches = laid_out(order, pad=pad)
    blocks = CacheBlocks(caches, BLOCKS)
    assert len(blocks.words) == blocks.layout.num_layers == num_pieces
    assert blocks.layout.block_bytes == 4 * (3 * 2 * SIZE + pad)
    kept = {name: cache.clone() for name, cache in caches.items()}
    worker = SwapWorker(blocks, 4)
    worker.begin(order_copy(0, TransferKind.SWAP_OUT, [1, BLOCKS - 1], [3, 0]))
    finish(worker)
    for cache in caches.values():
        cache[1], cache[BLOCKS - 1] = -1, -1
    worker.begin(order_copy(1, TransferKind.SWAP_IN, [2, BLOCKS - 1], [3, 0]))
    assert finish(worker)[2].ended == {1: (1, NONE)}
    worker.close()
    for name, cache in caches.items():
        sources = [0, None, 1, *range(3, BLOCKS)]
        for block, source in enumerate(sources):
            wanted = torch.full_like(cache[block], -1) if source is None else kept[name][source]
            assert torch.equal(cache[block], wanted), (name, block)


def test_layers_that_share_their_kv_are_copied_once() -> None:
    caches = laid_out("LBNHC")
    shared = CacheBlocks(caches | {"layer.3": caches["layer.1"]}, BLOCKS)
    assert [words.data_ptr() for words in shared.words] == [cache.data_ptr() for cache in caches.values()]


def test_blocks_that_vllm_splits_for_its_kernels_are_whole_for_copies() -> None:
    whole = together(0)
    split = whole.view(BLOCKS * 2, HEADS, TOKENS, DIM)
    blocks = CacheBlocks({"layer": split}, BLOCKS)
    assert torch.equal(blocks.words[0].view(torch.bfloat16).flatten(), whole.flatten())


def test_a_layout_with_heads_outside_of_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"layer.0 has the unsupported strides .* LBNHC and BLNHC"):
        CacheBlocks(laid_out("LHBNC"), BLOCKS)


def test_layers_of_several_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="blocks of several sizes"):
        CacheBlocks({"one": together(0), "other": together(0).float()}, BLOCKS)


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_the_pool_does_not_have_is_our_own_mistake(worker: SwapWorker, block: int) -> None:
    with pytest.raises(InvariantError, match="pool does not have"):
        worker.begin(order_copy(0, TransferKind.SWAP_OUT, [0, block], [0, 1]))


# -- copies ------------------------------------------------------------------------------------------------------------


def test_only_swap_ins_are_arrivals_and_each_is_reported_once(worker: SwapWorker) -> None:
    worker.begin(order_copy(0, TransferKind.BACKUP, [1], [2]))
    arrived, failed, report = finish(worker)
    assert (arrived, failed, report.ended) == (set(), set(), {0: (1, NONE)})
    assert sum(copied.num_blocks for copied in report.copy_times if copied.direction is Direction.OUTBOUND) == 1
    worker.begin(order_copy(1, TransferKind.SWAP_IN, [3], [2]))
    arrived, failed, report = finish(worker)
    assert (arrived, failed, report.ended) == ({f"{COPY}1"}, set(), {1: (1, NONE)})
    assert worker.finish() == (set(), set())
    assert worker.take_report() == WorkerReport()


def test_a_damaged_slot_is_a_copy_that_failed(worker: SwapWorker, caches: dict[str, torch.Tensor]) -> None:
    worker.begin(order_copy(0, TransferKind.SWAP_OUT, [0, 1], [0, 1]))
    finish(worker)
    worker.slots.words[1, 2, 7] ^= 1
    worker.begin(order_copy(1, TransferKind.SWAP_IN, [2, 3], [0, 1]))
    arrived, failed, report = finish(worker)
    assert (arrived, failed, report.ended) == ({f"{COPY}1"}, {f"{COPY}1"}, {1: (1, frozenset({1}))})
    worker.begin(order_copy(2, TransferKind.SWAP_IN, [4], [0]))  # the slot that is not damaged is restored
    arrived, failed, report = finish(worker)
    assert (arrived, failed, report.ended) == ({f"{COPY}2"}, set(), {2: (1, NONE)})
    assert torch.equal(caches["layer.2"][4], caches["layer.2"][0])


def test_a_copy_from_an_unwritten_slot_fails(worker: SwapWorker) -> None:
    worker.begin(order_copy(0, TransferKind.SWAP_IN, [0], [3]))
    arrived, failed, report = finish(worker)
    assert (arrived, failed, report.ended) == ({f"{COPY}0"}, {f"{COPY}0"}, {0: (1, frozenset({0}))})


def test_copies_in_flight_end_before_it_closes_and_it_closes_twice(caches: dict[str, torch.Tensor]) -> None:
    worker = make_worker(caches)
    worker.begin(order_copy(0, TransferKind.SWAP_OUT, [5], [7]))
    worker.close()
    worker.close()
    for layer, cache in enumerate(caches.values()):
        assert torch.equal(worker.slots.words[7, layer].view(torch.bfloat16), cache[5].flatten())


def test_after_draining_no_copy_is_in_flight_and_each_is_reported_once(worker: SwapWorker) -> None:
    worker.drain()  # with nothing to wait for
    worker.begin(order_copy(0, TransferKind.SWAP_OUT, [0, 1, 2], [0, 1, 2]))
    worker.begin(order_copy(1, TransferKind.BACKUP, [3], [4]))
    worker.drain()
    assert worker._space.num_in_flight == 0
    worker.begin(order_copy(2, TransferKind.SWAP_IN, [5], [4]))
    worker.drain()
    worker.drain()
    assert worker.finish() == ({f"{COPY}2"}, set())
    assert worker.take_report().ended == {0: (1, NONE), 1: (1, NONE), 2: (1, NONE)}
    assert worker.finish() == (set(), set()) and worker.take_report() == WorkerReport()


# -- reports -----------------------------------------------------------------------------------------------------------

ENDED = st.dictionaries(st.integers(0, 5), st.tuples(st.integers(1, 3), st.frozensets(st.integers(0, 3))))
TIMES = st.lists(
    st.builds(CopyTime, st.just(Tier.HOST), st.sampled_from(Direction), st.just(1), st.integers(1, 9), st.just(0.5))
)
REPORTS = st.builds(WorkerReport, ENDED, TIMES.map(tuple))


@given(reports=st.lists(REPORTS, min_size=1))
def test_merged_reports_count_workers_and_lose_what_any_of_them_lost(reports: list[WorkerReport]) -> None:
    merged = WorkerReport()
    for report in reports:
        merged = merged.merge(report)
    for number in range(6):
        said = [report.ended[number] for report in reports if number in report.ended]
        together = (sum(n for n, _ in said), NONE.union(*(lost for _, lost in said)))
        assert merged.ended.get(number) == (together if said else None)
    assert merged.copy_times == tuple(copied for report in reports for copied in report.copy_times)


@given(one=REPORTS, two=REPORTS, three=REPORTS)
def test_reports_merge_in_any_order(one: WorkerReport, two: WorkerReport, three: WorkerReport) -> None:
    before = (dict(one.ended), dict(two.ended))
    assert one.merge(two).ended == two.merge(one).ended
    assert one.merge(two).merge(three) == one.merge(two.merge(three))
    assert one.merge(WorkerReport()) == WorkerReport().merge(one) == one
    assert (one.ended, two.ended) == before, "merging changes neither"


@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 1, 4), (5, 3, 20)])
def test_a_slot_is_as_large_as_a_block_whatever_a_token_takes(shape: tuple[int, ...]) -> None:
    """In a smaller one copies would write past the end."""
    layout = CacheBlocks({"layer": torch.zeros(shape, dtype=torch.uint8)}, 5).layout
    assert layout.block_bytes == shape[1] * shape[2]


def test_pieces_are_in_the_order_of_layers_wherever_they_lie() -> None:
    memory = torch.zeros(3 * BLOCKS * SIZE)
    places = {"layer.0": 2, "layer.1": 0, "layer.2": 1}
    caches = {name: memory[place * BLOCKS * SIZE :][: BLOCKS * SIZE].view(BLOCKS, -1) for name, place in places.items()}
    assert [words.data_ptr() for words in CacheBlocks(caches, BLOCKS).words] == [
        one.data_ptr() for one in caches.values()
    ]


def test_layers_of_groups_that_share_memory_are_copied_once() -> None:
    """A block serves one group at a time, and their layers differ in the tokens of a block."""
    memory = torch.arange(5 * 32, dtype=torch.uint8)
    caches = {"full.0": memory.view(5, 4, 8), "window.0": memory.view(5, 2, 16), "window.1": torch.zeros(5, 32).byte()}
    blocks = CacheBlocks(caches, 5)
    assert blocks.layout.block_bytes == 64
    assert [words.shape for words in blocks.words] == [(5, 8), (5, 8)]


def test_parts_of_groups_that_overlap_in_one_piece_are_that_piece() -> None:
    """Blocks outermost: [ A | B | rest ] for one group, [   C   | D ] for the other."""
    memory = torch.arange(5 * 64, dtype=torch.uint8).view(5, 64)
    parts = {"a": memory[:, :16], "b": memory[:, 16:32], "c": memory[:, :40], "d": memory[:, 40:56]}
    [words] = CacheBlocks(parts, 5).words
    assert words.shape == (5, 16) and words[2].view(torch.uint8).tolist() == memory[2].tolist()


def test_states_of_a_layer_and_the_attention_that_shares_their_blocks_are_one_piece() -> None:
    """A page is as large as the attention's block: the two states of the other layer leave a part of it unused."""
    memory = torch.arange(5 * 64, dtype=torch.uint8).view(5, 64)
    layer = [memory[:, :24].view(5, 2, 12), memory[:, 24:40].view(5, 4, 4)]
    [words] = CacheBlocks({"state": layer, "attention": memory.view(5, 4, 16)}, 5).words
    assert words.shape == (5, 16)
    with pytest.raises(UserError, match="unsupported strides"):
        CacheBlocks({"state": [layer[0], memory[:, 32:40]]}, 5)


def test_what_moved_is_counted_once(worker: SwapWorker) -> None:
    block_bytes = worker.slots.layout.block_bytes
    for transfer_id, kind in enumerate((TransferKind.BACKUP, TransferKind.SWAP_OUT, TransferKind.SWAP_IN)):
        slots = [0, 1] if kind is not TransferKind.SWAP_OUT else [2, 3]
        worker.begin(order_copy(transfer_id, kind, [0, 1], slots))
        finish(worker)
    counts = worker.tally.take()["counts"]
    assert counts == {"swap_bytes_total out host": 4 * block_bytes, "swap_bytes_total in host": 2 * block_bytes}
    assert worker.tally.take()["counts"] == {}


def test_a_copy_that_failed_is_counted_with_its_problem(worker: SwapWorker) -> None:
    worker.begin(order_copy(0, TransferKind.SWAP_IN, [0], [1]))
    finish(worker)
    assert worker.tally.take()["counts"]["failed_transfers_total empty_slot"] == 1
