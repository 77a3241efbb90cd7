"""One instance's pages, alone and in groups: a machine of random drops, settlements, shrinks and returns.

It runs on host memory, and on a GPU's, by the driver or a fake of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.arena import Page
from floodplain.memory.group_memory import GroupMemory
from floodplain.memory.host.device import open_private_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.paged_buffer import PagedBuffer

EVEN = KVLayout(num_layers=4, block_tokens=4, num_kv_heads=1, head_dim=2048, dtype=torch.bfloat16)  # 2 to a page
ODD = KVLayout(num_layers=3, block_tokens=4, num_kv_heads=3, head_dim=256, dtype=torch.float32)  # 8 to 3 pages
PARAM_PAGES = [3, 1, 2, 5]


def pattern(layout: KVLayout, layer: int, tag: int) -> np.ndarray:
    """Return uint8 [layer_block_bytes]: a layer's part of a block."""
    words = np.arange(layout.layer_block_words, dtype=np.int32) * (2 * layer + 3) + tag
    return words.view(np.uint8)


class GroupMachine(RuleBasedStateMachine):
    """One instance: a pool while alone, a ``GroupMemory`` in a group. Each used block is filled with a tag."""

    layout = EVEN
    memory_class = GroupMemory

    def open_device(self) -> Any:
        """Open a device with at least 96 pages of its own."""
        return open_private_device(2**24)

    @initialize(data=st.data(), num_quanta=st.integers(1, 6), stop=st.booleans())
    def open(self, data: st.DataObject, num_quanta: int, stop: bool) -> None:
        self.device = self.open_device()
        self.buffers = [PagedBuffer(self.device, count * self.device.page_bytes - 64) for count in PARAM_PAGES]
        self.buffers = self.buffers[: self.layout.num_layers]
        for buffer in self.buffers:
            pages = self.device.allocate(buffer.num_pages)
            assert pages is not None
            buffer.map(pages)
        self.fill()
        self.pool = KVPool(self.device, self.layout, 100)
        self.ledger = BlockLedger(0, self.layout.block_tokens, quantum_blocks=self.pool.quantum_blocks)
        self.num_blocks = num_quanta * self.pool.quantum_blocks
        assert self.pool.grow(self.ledger, self.num_blocks) is not None
        self.num_pages = self.device.num_owned_pages
        self.memory = self.memory_class(self.device, self.layout, self.buffers)
        self.taken: list[Page] = []
        self.tags: dict[tuple[int, int], int] = {}  # (layer, group block) -> tag, of kept layers
        self.left: dict[tuple[int, int], int] = {}  # of layers that leave
        self.next_tag = 1
        self.is_settled = True
        self.drop(data, stop)

    def fill(self) -> None:
        """Write the parameters of every layer that has lost them."""
        for layer, buffer in enumerate(self.buffers):
            if not buffer.is_filled:
                buffer.tensor.fill_(layer + 1)
                buffer.is_filled = True

    def draw_kept(self, data: st.DataObject, among: range) -> range:
        begin = data.draw(st.integers(among.start, among.stop - 1))
        return range(begin, data.draw(st.integers(begin + 1, among.stop)))

    def drop(self, data: st.DataObject, stop: bool) -> None:
        quanta, size = self.pool.quanta, self.pool.quantum_blocks
        used = data.draw(st.lists(st.sampled_from(quanta), unique=True))
        for layer in range(self.layout.num_layers):
            for quantum in used:
                for block in range(quantum * size, (quantum + 1) * size):
                    self.tags[layer, block] = self.next_tag
                    words = pattern(self.layout, layer, self.next_tag).view(np.int32)
                    self.pool.words[layer][block] = torch.from_numpy(words.copy())
                    self.next_tag += 1
        kept = self.draw_kept(data, range(self.layout.num_layers))
        pages = self.pool.shrink(self.ledger, 0).pages
        num_free = sum(b.num_pages for i, b in enumerate(self.buffers) if i not in kept)
        num_free += (len(quanta) - len(used)) * self.layout.num_layers * self.memory.quantum_pages
        most = num_free // (len(kept) * self.memory.quantum_pages) + len(used)
        num_quanta = data.draw(st.integers(max(1, len(used)), max(1, most)))
        first = data.draw(st.integers(0, num_quanta - len(used)))
        if not stop or self.fail_drop(data, pages, quanta, used, kept, first, num_quanta):
            self.memory.drop(pages, quanta, used, kept, first, num_quanta)
        self.regroup(used, kept, first)
        self.is_settled = not used or len(kept) == self.layout.num_layers
        event(f"dropped to {len(kept)} of {self.layout.num_layers} layers")

    def fail_drop(self, data: st.DataObject, pages: list[Page], *args: object) -> bool:
        """Whether a drop exceeds the limit on mappings at a random point: then nothing has changed."""
        budget = self.device._budget
        room, budget.max_mappings = budget.max_mappings, budget.num_mappings + data.draw(st.integers(-20, 40))
        owned = self.device.num_owned_pages
        try:
            self.memory.drop(pages, *args)  # type: ignore[arg-type]
        except UserError:
            assert not self.memory.kept and self.memory.abandon() == []
            assert all(buffer.is_filled for buffer in self.buffers) and self.parameters_are_there()
            assert self.device.num_owned_pages == owned
            event("a drop met the limit on mappings")
            return True
        finally:
            budget.max_mappings = room
        return False

    def regroup(self, used: Sequence[int], kept: range, first: int) -> None:
        """Set the expected tag of each block after a drop."""
        size = self.pool.quantum_blocks
        at = {quantum: first + k for k, quantum in enumerate(used)}
        moved = {
            (layer, at[block // size] * size + block % size): tag
            for (layer, block), tag in self.tags.items()
            if block // size in at
        }
        self.tags = {key: tag for key, tag in moved.items() if key[0] in kept}
        self.left = {key: tag for key, tag in moved.items() if key[0] not in kept}

    @precondition(lambda self: self.is_settled)
    @rule(data=st.data())
    def drop_more(self, data: st.DataObject) -> None:
        memory, quanta = self.memory, self.memory.quanta
        before, kept = memory.kept, self.draw_kept(data, memory.kept)
        used = data.draw(st.lists(st.sampled_from(quanta), unique=True)) if quanta else []
        first = data.draw(st.integers(0, 2))
        try:
            memory.drop_more(used, kept, first, first + len(used))
        except InvariantError as error:
            assert "free pages" in str(error)
            return
        self.regroup(used, kept, first)
        self.is_settled = not used or kept == before
        event("dropped more")

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        size, quanta = self.pool.quantum_blocks, self.memory.quanta
        if not quanta:
            return
        blocks = [quantum * size + data.draw(st.integers(0, size - 1)) for quantum in quanta[-3:]]
        for layer in self.memory.kept:
            rows = [pattern(self.layout, layer, self.next_tag + k) for k in range(len(blocks))]
            assert self.memory.write(layer, blocks, np.array(rows))
            self.tags |= {(layer, block): self.next_tag + k for k, block in enumerate(blocks)}
        self.next_tag += len(blocks)

    @rule(more=st.integers(0, 4), settles=st.booleans())
    def grow(self, more: int, settles: bool) -> None:
        before, num_free = self.memory.quanta, self.memory.num_spare_pages
        num_quanta = len(before) + more
        new = self.memory.settle(num_quanta) if settles else self.memory.grow(num_quanta)
        if new is None:
            assert num_free < more * len(self.memory.kept) * self.memory.quantum_pages
            return
        assert self.memory.quanta == tuple(sorted({*before, *new})) and len(new) == more
        if settles:
            self.left, self.is_settled = {}, True

    @precondition(lambda self: self.is_settled)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        size, quanta = self.pool.quantum_blocks, self.memory.quanta
        gone = data.draw(st.lists(st.sampled_from(quanta), unique=True)) if quanta else []
        layer = self.memory.kept.start
        used = [block for owner, block in self.tags if owner == layer and block // size in gone]
        room = [
            q * size + k for q in quanta if q not in gone for k in range(size) if (layer, q * size + k) not in self.tags
        ]
        moves = list(zip(used, room, strict=False))
        self.memory.shrink(moves, gone)
        moved = dict(moves)
        self.tags = {
            (owner, moved.get(block, block)): tag
            for (owner, block), tag in self.tags.items()
            if block in moved or block // size not in gone
        }
        assert self.memory.quanta == tuple(q for q in quanta if q not in gone)

    @rule(fills=st.booleans())
    def map_parameters(self, fills: bool) -> None:
        missing = self.memory.num_missing_pages
        assert self.memory.map_parameters() == (self.memory.num_missing_pages == 0)
        if missing and not self.memory.num_missing_pages:
            assert not all(buffer.is_filled for buffer in self.buffers)
            event("parameters mapped")
        if fills and not self.memory.num_missing_pages:
            self.fill()

    @rule(data=st.data())
    def take_spare(self, data: st.DataObject) -> None:
        spare = self.memory.num_spare_pages
        count = data.draw(st.integers(0, spare))
        taken = self.memory.take_spare(count)
        assert taken is not None and len(taken) == count
        self.taken += taken
        assert self.memory.take_spare(spare - count + 1) is None

    @rule(data=st.data(), in_order=st.booleans(), stop=st.booleans())
    def return_to_pool(self, data: st.DataObject, in_order: bool, stop: bool) -> None:
        """From any state the pool gets as many blocks as before, and the parameters get pages. Then drop again."""
        if in_order and self.memory.num_missing_pages:
            with pytest.raises(InvariantError, match="have no parameters"):
                self.memory.close_group()
            return
        pages = self.taken + (self.memory.close_group() if in_order else self.memory.abandon())
        assert self.pool.count_growth_pages(self.num_blocks) == len(pages)
        assert self.pool.grow(self.ledger, self.num_blocks, pages) is not None
        assert all(buffer.is_mapped for buffer in self.buffers)
        self.fill()
        assert self.memory.abandon() == []
        self.taken, self.tags, self.left = [], {}, {}
        assert not self.memory.kept and self.memory.read(0, [0]) is None
        with pytest.raises(InvariantError, match="another member"):
            self.memory.layers[0]
        self.pages_are_conserved()
        event("closed in order" if in_order else "abandoned")
        self.drop(data, stop)

    def parameters_are_there(self) -> bool:
        return all(
            bool((buffer.tensor == layer + 1).all()) for layer, buffer in enumerate(self.buffers) if buffer.is_filled
        )

    @invariant()
    def used_blocks_keep_their_bytes(self) -> None:
        for (layer, block), tag in (self.tags | self.left).items():
            found = self.memory.read(layer, [block])
            assert found is not None and (found[0] == pattern(self.layout, layer, tag)).all()
        for layer, block in self.tags:
            tensor = self.memory.layers[layer][block]
            assert (tensor.view(torch.uint8).flatten().cpu().numpy() == self.memory.read(layer, [block])).all()

    @invariant()
    def pages_are_conserved(self) -> None:
        self.memory.check_integrity()
        in_buffers = sum(buffer.num_pages for buffer in self.buffers if buffer.is_mapped)
        held = len(self.memory._owned) + len(self.taken) + self.pool.num_mapped_pages
        assert self.device.num_owned_pages == self.num_pages == held + in_buffers

    @invariant()
    def kept_and_filled_parameters_keep_their_bytes(self) -> None:
        assert self.parameters_are_there()
        assert all(self.buffers[layer].is_filled for layer in self.memory.kept)

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.device.close()
