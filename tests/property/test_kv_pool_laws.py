"""Random growth, shrinking, allocation and copying: every surviving block keeps its bytes, every page is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError, UserError
from floodplain.core.free_blocks import BlockId
from floodplain.memory.arena import Page
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from tests.support.examples import examples

EVEN = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=1024, dtype=torch.bfloat16)  # 4 to a page
ODD = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=3, head_dim=256, dtype=torch.float32)  # 8 to 3 pages
LARGE = KVLayout(num_layers=1, block_tokens=16, num_kv_heads=4, head_dim=256, dtype=torch.float32)  # 1 to 2 pages
LAYOUTS = [EVEN, ODD, LARGE]
MAX_BLOCKS = 40


def make_pool(device: HostDevice, layout: KVLayout, num_blocks: int) -> tuple[KVPool, BlockLedger]:
    pool = KVPool(device, layout, MAX_BLOCKS)
    ledger = BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks)
    assert pool.grow(ledger, num_blocks) is not None
    return pool, ledger


def write(pool: KVPool, block: int, tag: int) -> None:
    for layer, words in enumerate(pool.words):
        words[block] = torch.arange(words.shape[1], dtype=torch.int32) * (layer + 3) + tag


def holds(pool: KVPool, block: int, tag: int) -> bool:
    return all(
        torch.equal(words[block], torch.arange(words.shape[1], dtype=torch.int32) * (layer + 3) + tag)
        for layer, words in enumerate(pool.words)
    )


class PoolMachine(RuleBasedStateMachine):
    """Sequences own blocks filled with a tag; two sequences may share a block."""

    layout = EVEN

    @initialize(num_blocks=st.integers(0, 20), spare_pages=st.integers(0, 12))
    def open(self, num_blocks: int, spare_pages: int) -> None:
        pages = -(-MAX_BLOCKS * self.layout.block_bytes // PAGE_BYTES) + spare_pages
        self.device = open_private_device(pages * PAGE_BYTES)
        self.pool, self.ledger = make_pool(self.device, self.layout, num_blocks)
        self.tables: list[list[BlockId]] = []
        self.tags: dict[BlockId, int] = {}
        self.next_tag = 1
        self.spare: list[Page] = []

    def write(self, block: int, tag: int) -> None:
        write(self.pool, block, tag)

    def holds(self, block: int, tag: int) -> bool:
        return holds(self.pool, block, tag)

    @rule(count=st.integers(1, 9))
    def allocate(self, count: int) -> None:
        blocks = self.ledger.allocate(count)
        if blocks is None:
            return
        self.tables.append(blocks)
        for block in blocks:
            self.write(block, self.next_tag)
            self.tags[block] = self.next_tag
            self.next_tag += 1
        self.ledger.seal(blocks[0], str(self.next_tag).encode())

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tables:
            self.ledger.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Another sequence takes a cached or owned prefix."""
        keys = [k for k in (str(tag).encode() for tag in range(self.next_tag + 1)) if self.ledger.find(k) is not None]
        if keys:
            block = self.ledger.share(data.draw(st.sampled_from(keys)))
            assert block is not None
            self.tables.append([block])

    @rule(survivors=st.sets(st.integers(0, MAX_BLOCKS - 1), max_size=6))
    def scatter(self, survivors: set[int]) -> None:
        """Fill the pool, then keep only some sequences of one block each, so that a shrink moves blocks."""
        while self.ledger.num_available:
            self.allocate(1)
        leaving = [table for table in self.tables if not survivors & {*table}]
        self.tables = [table for table in self.tables if survivors & {*table}]
        for table in leaving:
            self.ledger.free(table)

    @rule(count=st.integers(0, 25))
    def grow(self, count: int) -> None:
        before = self.pool.num_blocks
        new = self.pool.grow(self.ledger, count)
        if new is None:
            assert before + count > MAX_BLOCKS or self.pool.count_growth_pages(count) > self.device.num_free_pages()
        assert self.pool.num_blocks == before + (0 if new is None else count)

    @rule(num_wanted=st.integers(0, MAX_BLOCKS))
    def shrink(self, num_wanted: int) -> None:
        num_used = len({block for table in self.tables for block in table})
        before = self.pool.num_blocks
        shrunk = self.pool.shrink(self.ledger, num_wanted)
        self.device.release(shrunk.pages)
        event(f"moved {len(shrunk.moved)} blocks")
        self.tables = [[shrunk.moved.get(block, block) for block in table] for table in self.tables]
        for old, new in shrunk.moved.items():
            self.tags[new] = self.tags.pop(old)
        wanted = max(num_used, min(num_wanted, before))
        quanta = {block // self.pool.quantum_blocks for block in range(MAX_BLOCKS * 2) if self.pool.is_backed(block)}
        assert self.pool.num_blocks >= wanted
        assert len(quanta) == math.ceil(wanted / self.pool.quantum_blocks)

    @invariant()
    def every_held_block_keeps_its_bytes(self) -> None:
        for block in {block for table in self.tables for block in table}:
            assert self.holds(block, self.tags[block])

    @invariant()
    def ledger_pool_and_device_agree(self) -> None:
        self.ledger.check_integrity(self.tables)
        assert self.ledger.num_blocks == self.pool.num_blocks
        assert self.device.num_owned_pages == self.pool.num_mapped_pages + len(self.spare)

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.device.close()


class OddPoolMachine(PoolMachine):
    """Blocks that cross pages, and quanta of several pages."""

    layout = ODD


class LargePoolMachine(PoolMachine):
    """Blocks of several pages."""

    layout = LARGE


PoolMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=20, deadline=None)
OddPoolMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=20, deadline=None)
LargePoolMachine.TestCase.settings = settings(max_examples=examples(10), stateful_step_count=20, deadline=None)
TestPoolMachine = PoolMachine.TestCase
TestOddPoolMachine = OddPoolMachine.TestCase
TestLargePoolMachine = LargePoolMachine.TestCase


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_has_the_requested_blocks_and_no_spare_page(layout: KVLayout) -> None:
    for num_blocks in (1, 2, 3, 5, 9):
        with open_private_device(2**25) as device:
            pool, ledger = make_pool(device, layout, num_blocks)
            assert ledger.num_blocks == pool.num_blocks == num_blocks
            quanta, rest = divmod(num_blocks, pool.quantum_blocks)
            whole = quanta * pool.quantum_blocks * layout.layer_block_bytes // PAGE_BYTES
            partial = math.ceil(rest * layout.layer_block_bytes / PAGE_BYTES)
            assert device.num_owned_pages == layout.num_layers * (whole + partial)
            write(pool, num_blocks - 1, 7)
            assert holds(pool, num_blocks - 1, 7)


def test_the_quantum_of_a_large_model_on_two_mebibyte_pages() -> None:
    llama = KVLayout(num_layers=32, block_tokens=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    blocks = llama.count_quantum_blocks(2 * 2**20)
    assert blocks == 32
    assert blocks * llama.block_bytes == 64 * 2**20


def test_a_shrink_gives_pages_that_another_pool_grows_with() -> None:
    with open_private_device(2**24) as device:
        giver, ledger = make_pool(device, EVEN, 16)
        taker = KVPool(device, EVEN, MAX_BLOCKS)
        other = BlockLedger(0, 4, quantum_blocks=taker.quantum_blocks)
        pages = giver.shrink(ledger, 8).pages
        assert len(pages) == taker.count_growth_pages(8)
        assert taker.grow(other, 8, pages) == list(range(8))
        with pytest.raises(InvariantError, match="pages for"):
            taker.grow(other, 8, pages[:1])
        giver.unmap_quanta(giver.quanta)
        with pytest.raises(InvariantError, match="the ledger has 8 blocks"):
            giver.shrink(ledger, 0)


class BrokenPool(KVPool):
    """A pool whose device is lost while blocks move."""

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        raise RuntimeError("device lost")


def test_a_failed_move_leaves_everything_as_it_was() -> None:
    with open_private_device(2**24) as device:
        pool = BrokenPool(device, EVEN, MAX_BLOCKS)
        ledger = BlockLedger(0, EVEN.block_tokens, quantum_blocks=pool.quantum_blocks)
        pool.grow(ledger, 16)
        blocks = ledger.allocate(16)
        assert blocks is not None
        kept = blocks[::3]
        ledger.free([b for b in blocks if b not in kept])
        for block in kept:
            write(pool, block, block)
        with pytest.raises(RuntimeError, match="device lost"):
            pool.shrink(ledger, 0)
        ledger.check_integrity([kept])
        assert ledger.num_blocks == pool.num_blocks == 16
        assert all(holds(pool, block, block) for block in kept)


def test_a_growth_that_exceeds_mappings_in_its_second_layer_is_undone() -> None:
    with open_private_device(2**24) as device:
        pool, ledger = make_pool(device, EVEN, 4)
        device._budget.max_mappings = device._budget.num_mappings + 1
        second = device.allocate(2)
        assert second is not None
        with pytest.raises(UserError, match="max_map_count"):
            pool.grow(ledger, 8)  # the second layer's pages are not contiguous with its first ones
        assert pool.num_blocks == ledger.num_blocks == 4
        assert device.num_owned_pages == 4


def test_copies_of_absent_or_doubled_blocks_are_refused() -> None:
    with open_private_device(2**24) as device:
        pool, _ = make_pool(device, EVEN, 8)
        for moves in ([(0, 8)], [(-1, 0)], [(0, MAX_BLOCKS)], [(0, 1), (1, 2)], [(0, 2), (1, 2)]):
            with pytest.raises(InvariantError):
                pool.move_blocks(moves)


def test_a_device_without_room_refuses_growth_and_keeps_nothing() -> None:
    with open_private_device(4 * PAGE_BYTES) as device:
        pool, ledger = make_pool(device, EVEN, 4)
        assert pool.grow(ledger, 8) is None
        assert device.num_owned_pages == 2
        assert pool.grow(ledger, 4) == [4, 5, 6, 7]
        assert SwapSlots(EVEN, 1).words.nbytes == EVEN.block_bytes
