"""Layers of a KV pool go and return among growth, shrinking and copies: blocks keep their bytes in each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.transfer import NativeMover, NumpyMover, open_mover
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import Direction
from tests.property.test_kv_pool_laws import MAX_BLOCKS, PoolMachine
from tests.support.examples import examples

EVEN = KVLayout(num_layers=4, block_tokens=4, num_kv_heads=1, head_dim=1024, dtype=torch.bfloat16)  # 4 to a page
ODD = KVLayout(num_layers=3, block_tokens=4, num_kv_heads=3, head_dim=256, dtype=torch.float32)  # 8 to 3 pages
NOISE = -559038737


def pattern(layout: KVLayout, layer: int, tag: int) -> torch.Tensor:
    return torch.arange(layout.layer_block_words, dtype=torch.int32) * (layer + 3) + tag


def host_copy(layout: KVLayout, max_blocks: int) -> torch.Tensor:
    return torch.full((max_blocks, layout.layer_block_words), NOISE, dtype=torch.int32)


def move(mover: NativeMover | NumpyMover, direction: Direction, block: int) -> int:
    return int(mover.move(direction, np.array([block]), np.array([0]))[0])


class LayersMachine(PoolMachine):
    """Layers are mapped, or streamed: their blocks are in a copy on the host.

    The oracle is a tag for each held block and a place for each layer.
    """

    layout = EVEN

    @initialize(num_blocks=st.integers(0, 20), spare_pages=st.integers(0, 12))
    def open(self, num_blocks: int, spare_pages: int) -> None:
        super().open(num_blocks, spare_pages)
        self.slots = SwapSlots(self.layout, 1)
        self.movers = [open_mover(self.pool, self.slots), NumpyMover(self.pool, self.slots)]
        self.copies: dict[int, torch.Tensor] = {}

    @property
    def held(self) -> list[int]:
        return sorted({block for table in self.tables for block in table})

    @property
    def kept(self) -> list[int]:
        """Blocks whose bytes a request may need, cached ones included."""
        return [block for block in self.tags if self.pool.is_backed(block)]

    def is_home(self, layer: int) -> bool:
        return layer in self.pool.mapped_layers and layer not in self.copies

    def words(self, layer: int) -> torch.Tensor:
        """Return the words of the layer's blocks, in its copy or its arena."""
        if layer in self.copies:
            return self.copies[layer]
        return self.pool.layers[layer].view(torch.int32).view(self.pool.max_blocks, -1)

    def write(self, block: int, tag: int) -> None:
        for layer in range(self.layout.num_layers):
            self.words(layer)[block] = pattern(self.layout, layer, tag)

    def holds(self, block: int, tag: int) -> bool:
        layers = range(self.layout.num_layers)
        return all(torch.equal(self.words(layer)[block], pattern(self.layout, layer, tag)) for layer in layers)

    def choose(self, data: st.DataObject, layers: set[int], most: int) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(layers)), min_size=1, max_size=most, unique=True))

    def copy_out(self, layers: list[int]) -> None:
        for layer in layers:
            copy = host_copy(self.layout, self.pool.max_blocks)
            for block in self.kept:
                copy[block] = self.pool.words[layer][block]
            self.copies[layer] = copy
            self.pool.place_layer(layer, copy)

    @precondition(lambda self: len(self.pool.mapped_layers) > 1)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        mapped = self.pool.mapped_layers
        layers = self.choose(data, {*mapped}, len(mapped) - 1)
        at_home = [layer for layer in layers if self.is_home(layer)]
        if at_home:
            with pytest.raises(InvariantError, match="nowhere else"):
                self.pool.unmap_layers(layers)
        self.copy_out(at_home)
        pages = self.pool.unmap_layers(layers)
        assert len(pages) == self.pool.num_layer_pages * len(layers)
        self.spare += pages

    @precondition(lambda self: any(map(self.is_home, self.pool.mapped_layers)))
    @rule(data=st.data())
    def lend_an_arena(self, data: st.DataObject) -> None:
        """Move a layer's blocks to the host; its arena stays mapped, for other layers to stream through."""
        (layer,) = self.choose(data, set(filter(self.is_home, self.pool.mapped_layers)), 1)
        self.copy_out([layer])
        for block in filter(self.pool.is_backed, range(self.pool.max_blocks)):
            self.pool.layers[layer][block] = torch.nan

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        layers = self.choose(data, {*self.copies}, self.layout.num_layers)
        unmapped = [layer for layer in layers if layer not in self.pool.mapped_layers]
        num_pages = self.pool.num_layer_pages * len(unmapped)
        fresh = self.device.allocate(max(0, num_pages - len(self.spare)))
        if fresh is None:
            return
        self.spare += fresh
        pages, self.spare = self.spare[:num_pages], self.spare[num_pages:]
        self.pool.map_layers(unmapped, pages)
        for layer in layers:
            copy = self.copies.pop(layer)
            self.pool.place_layer(layer, None)
            for block in self.kept:
                self.pool.words[layer][block] = copy[block]

    @rule(count=st.integers(1, 12))
    def grow_by_what_layers_left(self, count: int) -> None:
        num_pages = self.pool.count_growth_pages(count)
        if num_pages is None or num_pages > len(self.spare):
            return
        new = self.pool.grow(self.ledger, count, self.spare[:num_pages])
        assert new is not None
        assert len(new) == count
        self.spare = self.spare[num_pages:]

    @rule()
    def release(self) -> None:
        self.device.release(self.spare)
        self.spare = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """A block is copied to its slot and back, in all layers, wherever these are; both movers give one digest."""
        block = data.draw(st.sampled_from(self.held))
        self.pool.expect_backed([block])
        layers = range(self.layout.num_layers)
        expected = torch.stack([pattern(self.layout, layer, self.tags[block]) for layer in layers])
        digest = compute_digests(expected.view(1, -1).numpy(), compute_weights(expected.numel()))[0]
        for mover in self.movers:
            self.slots.words.fill_(NOISE)
            assert move(mover, Direction.OUTBOUND, block) == digest
            assert torch.equal(self.slots.words[0], expected)
            for layer in layers:
                self.words(layer)[block] = NOISE
            assert move(mover, Direction.INBOUND, block) == digest

    @invariant()
    def only_mapped_layers_are_given_to_compute(self) -> None:
        for layer in {*range(self.layout.num_layers)} - {*self.pool.mapped_layers}:
            with pytest.raises(InvariantError, match=f"layer {layer} is not mapped"):
                self.pool.layers[layer]

    @invariant()
    def bytes_of_a_block_are_two_numbers(self) -> None:
        assert self.pool.block_bytes == len(self.pool.mapped_layers) * self.layout.layer_block_bytes
        assert self.slots.words.nbytes == self.layout.block_bytes


class OddLayersMachine(LayersMachine):
    """Blocks that cross pages, and quanta of several pages."""

    layout = ODD


LayersMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
OddLayersMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
TestLayersMachine = LayersMachine.TestCase
TestOddLayersMachine = OddLayersMachine.TestCase


def copy_out(pool: KVPool, layer: int, num_blocks: int) -> torch.Tensor:
    """Place a layer in a copy on the host."""
    copy = host_copy(pool.layout, pool.max_blocks)
    copy[:num_blocks] = pool.words[layer][:num_blocks]
    pool.place_layer(layer, copy)
    return copy


@contextmanager
def pool_of(layout: KVLayout, num_blocks: int) -> Iterator[tuple[HostDevice, KVPool, BlockLedger]]:
    """A pool whose blocks have their ids as tags."""
    with open_private_device(2**24) as device:
        pool = KVPool(device, layout, MAX_BLOCKS)
        ledger = BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks)
        assert pool.grow(ledger, num_blocks) is not None
        for layer, words in enumerate(pool.words):
            for block in range(num_blocks):
                words[block] = pattern(layout, layer, block)
        yield device, pool, ledger


def test_a_shrink_moves_blocks_in_the_copies_of_streamed_layers_too() -> None:
    with pool_of(ODD, 24) as (_, pool, ledger):
        blocks = ledger.allocate(24)
        assert blocks is not None
        copy = copy_out(pool, 1, 24)
        pool.unmap_layers([1])
        kept = blocks[::5]
        ledger.free([block for block in blocks if block not in kept])
        moved = pool.shrink(ledger, 0).moved
        assert moved
        assert all(torch.equal(copy[moved.get(block, block)], pattern(ODD, 1, block)) for block in kept)


def test_addresses_that_are_not_read_anew_would_show() -> None:
    """Control: a mover with cached addresses copies the new contents of a layer's old arena."""
    with pool_of(EVEN, 8) as (_, pool, _ledger):

        class Before:
            layout, words = pool.layout, pool.words
            expect_backed = pool.expect_backed

        slots = SwapSlots(EVEN, 1)
        stale, mover = open_mover(Before(), slots), open_mover(pool, slots)
        expected = move(stale, Direction.OUTBOUND, 5)
        copy_out(pool, 2, 8)
        pool.layers[2][:8] = torch.nan
        assert move(mover, Direction.OUTBOUND, 5) == expected
        assert move(stale, Direction.OUTBOUND, 5) != expected


def test_layers_go_and_return_whole_or_not_at_all() -> None:
    with pool_of(EVEN, 8) as (device, pool, _):
        for layers in ([0, 0], [4], [0, 1, 2, 3]):
            with pytest.raises(InvariantError, match="cannot go"):
                pool.unmap_layers(layers)
        for layer in (1, 2):
            copy_out(pool, layer, 8)
        pages = pool.unmap_layers([1, 2])
        with pytest.raises(InvariantError, match="which is unmapped"):
            pool.place_layer(1, None)
        for layers, given in (([0], pages[:2]), ([1, 1], pages), ([1], pages)):
            with pytest.raises(InvariantError, match=r"not all unmapped|pages for"):
                pool.map_layers(layers, given)
        device._budget.max_mappings = device._budget.num_mappings + 1
        with pytest.raises(UserError, match="max_map_count"):
            pool.map_layers([1, 2], pages)
        assert pool.mapped_layers == (0, 3)
        device._budget.max_mappings += 10
        pool.map_layers([2], pages[2:])
        assert pool.mapped_layers == (0, 2, 3)
        assert torch.equal(pool.words[2][3], pattern(EVEN, 2, 3))


def test_a_copy_of_another_shape_is_refused() -> None:
    with pool_of(EVEN, 4) as (_, pool, _ledger):
        whole = host_copy(EVEN, pool.max_blocks)
        for wrong in (whole[:-1], whole.float(), whole.T.contiguous().T):
            with pytest.raises(InvariantError, match="not a layer's"):
                pool.place_layer(0, wrong)
        assert pool.words[0].data_ptr() == pool.layers[0].data_ptr()
