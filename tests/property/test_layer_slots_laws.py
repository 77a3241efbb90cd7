"""Layers that stream, with real arenas: every block that a step reads has the bytes of a pool that never streamed.

The oracle is a plain dictionary of tokens and layers. The line copies as late or as early as it may, and overwrites
the slots it loads into: a missing wait, write or order fails every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.layer_places import LayerPlaces, every_place
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.layer_line import PythonLayerLine, open_layer_line
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_line import LayerLine
from floodplain.memory.layer_slots import LayerSlots, find_read_blocks
from tests.support.examples import examples
from tests.support.layer_lines import ForgetfulSlots, OrderedLine

LAYOUT = KVLayout(num_layers=7, block_tokens=4, num_kv_heads=1, head_dim=1024, dtype=torch.bfloat16)  # 4 to a page
BASE_BLOCKS = 9
"""Two whole quanta and a part of one."""
PLACES = list(every_place(LAYOUT.num_layers))


class World:
    """A pool whose layers stream, a ledger, sequences that grow, and the expected value of each token in each layer."""

    def __init__(self, device: HostDevice, line: LayerLine, seed: int, kind: type[LayerSlots]) -> None:
        self.device, self.line, self.rng = device, line, Random(seed)
        most = BASE_BLOCKS * LAYOUT.num_layers // PLACES[-1].num_arenas + 8
        self.pool = KVPool(device, LAYOUT, most)
        self.ledger = BlockLedger(0, LAYOUT.block_tokens, quantum_blocks=self.pool.quantum_blocks)
        assert self.pool.grow(self.ledger, BASE_BLOCKS) is not None
        self.num_pages = device.num_owned_pages
        self.homes: list[torch.Tensor] = []
        self.slots = kind(self.pool, line, 3, self.open_home, self.close_home)
        if isinstance(line, OrderedLine):
            line.pool = self.pool
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.tags: dict[tuple[int, int, int], int] = {}  # (sequence, position, layer) -> its key; the value is one more
        self.next_tag = 1
        self.num_moved = 0
        self.kv = torch.empty(0)  # of the checked layer: as an argument, a failing test would print all of it

    def open_home(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.homes.append(torch.empty(shape, dtype=torch.int32))
        return self.homes[-1]

    def close_home(self, words: torch.Tensor) -> None:
        (index,) = [index for index, home in enumerate(self.homes) if home is words]
        del self.homes[index]

    def launch(self, work: Callable[[], None]) -> None:
        """Run work on the compute stream."""
        work()

    # -- events ----------------------------------------------------------------------------------------------------

    def begin_sequence(self) -> None:
        self.tables.append([])
        self.lengths.append(0)

    def end_sequence(self, index: int) -> None:
        table = self.tables.pop(index)
        self.lengths.pop(index)
        self.ledger.free(table)  # type: ignore[arg-type]
        self.tags = {
            (seq - (seq > index), position, layer): tag
            for (seq, position, layer), tag in self.tags.items()
            if seq != index
        }

    def step(self, counts: dict[int, int]) -> None:
        """Sequences feed these numbers of tokens: every layer reads earlier tokens, and writes the new ones."""
        starts = {index: self.lengths[index] for index in counts}
        tokens: list[int] = []
        for index, count in counts.items():
            end = starts[index] + count
            missing = max(0, -(-end // LAYOUT.block_tokens) - len(self.tables[index]))
            new = self.ledger.allocate(missing) if missing else []
            if new is None:
                return
            self.tables[index] += new
        for index, count in counts.items():
            for position in range(starts[index], starts[index] + count):
                block, offset = divmod(position, LAYOUT.block_tokens)
                tokens.append(self.tables[index][block] * LAYOUT.block_tokens + offset)
            self.lengths[index] += count
        self._compute(starts, counts, np.array(tokens, dtype=np.int64))

    def _compute(self, starts: dict[int, int], counts: dict[int, int], tokens: np.ndarray) -> None:
        width = max(len(self.tables[index]) for index in counts)
        tables = np.array([self.tables[i] + [0] * (width - len(self.tables[i])) for i in counts], dtype=np.int64)
        reads = find_read_blocks(tables, np.array(list(starts.values())), LAYOUT.block_tokens)
        self.slots.begin_step(reads, tokens)
        for layer in range(LAYOUT.num_layers):
            self.slots.before_layer(layer)
            kv = self.slots[layer].view(torch.int16)
            self.launch(partial(self.compute_layer, layer, kv, starts, counts))
            self.slots.after_layer(layer)

    def compute_layer(self, layer: int, kv: torch.Tensor, starts: dict[int, int], counts: dict[int, int]) -> None:
        self.kv = kv
        for index, count in counts.items():
            for position in range(starts[index]):
                self.expect(index, position, layer)
            for position in range(starts[index], starts[index] + count):
                self.write(index, position, layer)

    def write(self, index: int, position: int, layer: int) -> None:
        block, offset = divmod(position, LAYOUT.block_tokens)
        tag = self.next_tag = self.next_tag % 30_000 + 1
        self.tags[index, position, layer] = tag
        self.kv[self.tables[index][block], 0, offset] = tag
        self.kv[self.tables[index][block], 1, offset] = tag + 1

    def expect(self, index: int, position: int, layer: int) -> None:
        block, offset = divmod(position, LAYOUT.block_tokens)
        tag, where = self.tags[index, position, layer], self.tables[index][block]
        key, value = self.kv[where, 0, offset], self.kv[where, 1, offset]
        ends = [int(key[0, 0]), int(key[0, -1]), int(value[0, 0]), int(value[0, -1])]
        assert ends == [tag, tag, tag + 1, tag + 1], f"sequence {index}, token {position}, layer {layer}"

    def change(self, places: LayerPlaces) -> None:
        try:
            self.slots.change_to(places, self.ledger, self.remap)
        finally:
            self.check()

    def remap(self, moved: dict[BlockId, BlockId]) -> None:
        self.num_moved += len(moved)
        for table in self.tables:
            table[:] = [moved.get(BlockId(block), block) for block in table]

    def check(self) -> None:
        """Pages and blocks are conserved; every token is in its layer's copy at the place in its table."""
        self.ledger.check_integrity(self.tables)  # type: ignore[arg-type]
        assert self.pool.num_mapped_pages + len(self.slots._spare) == self.num_pages == self.device.num_owned_pages
        assert self.pool.num_blocks == self.ledger.num_blocks >= len({b for table in self.tables for b in table})
        self.slots.settle()
        for layer, words in enumerate(self.pool.words):
            self.kv = words.view(torch.int16).view(self.pool.max_blocks, *LAYOUT.block_shape)
            for index, length in enumerate(self.lengths):
                for position in range(length):
                    self.expect(index, position, layer)


@contextmanager
def world(line: LayerLine, seed: int, kind: type[LayerSlots] = LayerSlots, of: type[World] = World) -> Iterator[World]:
    with open_private_device(2**24) as device:
        one = of(device, line, seed, kind)
        try:
            yield one
        finally:
            one.slots.close()
            one.pool.close()
            assert not one.homes
        assert device.num_owned_pages == 0


def live(one: World, num_actions: int) -> None:
    """Sequences begin, grow by chunks and by tokens, and end; layers start and stop streaming at any boundary."""
    for _ in range(num_actions):
        act(one)
    one.check()


def act(one: World) -> None:
    """Execute one random event."""
    rng = one.rng
    action = rng.choice(["begin", "end", "step", "step", "step", "step", "change"])
    if action == "begin" and len(one.tables) < 4:
        one.begin_sequence()
    elif action == "end" and one.tables:
        one.end_sequence(rng.randrange(len(one.tables)))
    elif action == "step" and one.tables:
        chosen = rng.sample(range(len(one.tables)), rng.randint(1, len(one.tables)))
        one.step({index: rng.choice([1, 1, 1, 3, 9]) for index in chosen})
    elif action == "change":
        one.change(rng.choice(PLACES))


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=examples(10))
def test_what_a_step_reads_is_what_was_written(seed: int, is_late: bool) -> None:
    with world(OrderedLine(LAYOUT.num_layers, is_late=is_late), seed) as one:
        live(one, 40)


@pytest.mark.parametrize("is_native", [True, False])
def test_the_same_over_the_lines_of_the_host(is_native: bool) -> None:
    line = open_layer_line(LAYOUT.num_layers) if is_native else PythonLayerLine(LAYOUT.num_layers)
    for seed in range(6):
        with world(line if seed == 5 else open_layer_line(LAYOUT.num_layers), seed) as one:
            line.pace(2e8 * (seed % 2))
            live(one, 60)


@pytest.mark.parametrize("seed", range(2))
def test_tables_are_right_after_mappings_ran_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have moved by then: every token is still at the place in its table, and a retry completes the change."""

    def fail(layers: object, pages: object) -> None:
        raise UserError("the system's limit on mappings is reached")

    with world(OrderedLine(LAYOUT.num_layers), seed) as one:
        one.change(PLACES[-1])
        for index in range(one.pool.num_blocks):
            one.begin_sequence()
            one.step({index: LAYOUT.block_tokens})
        for index in reversed(range(one.pool.num_blocks)):
            if index % one.pool.quantum_blocks:  # one block of every quantum remains
                one.end_sequence(index)
        with monkeypatch.context() as patch:
            patch.setattr(one.pool, "map_layers", fail)
            with pytest.raises(UserError, match="limit on mappings"):
                one.change(PLACES[0])
        assert one.num_moved > 0
        one.change(PLACES[0])
        assert one.slots.places == PLACES[0]


def test_all_memory_serves_whatever_streams_and_all_comes_back() -> None:
    with world(OrderedLine(LAYOUT.num_layers), 0) as one:
        for places in [*PLACES, *reversed(PLACES)]:
            one.change(places)
            assert one.slots.places == places
            whole = BASE_BLOCKS * LAYOUT.num_layers // places.num_arenas // one.pool.quantum_blocks
            least = BASE_BLOCKS if places.num_streamed == 0 else whole * one.pool.quantum_blocks
            assert one.pool.num_blocks >= least, places


def test_a_full_pool_shrinks_as_far_as_possible_and_on_when_sequences_end() -> None:
    with world(OrderedLine(LAYOUT.num_layers), 0) as one:
        one.change(PLACES[-1])
        for index in range(4):
            one.begin_sequence()
            one.step({index: 16})
        one.change(PLACES[0])
        assert one.slots.places == PLACES[-1] and one.ledger.num_available < one.pool.quantum_blocks
        one.step(dict.fromkeys(range(4), 1))  # earlier tokens are read correctly
        while len(one.tables) > 1:
            one.end_sequence(0)
        one.change(PLACES[0])
        assert one.slots.places == PLACES[0] and one.pool.num_blocks >= BASE_BLOCKS
        one.step({0: 1})


@pytest.mark.parametrize("fault", ["wait", "settle", "partly filled", "write", "order"])
def test_control_each_step_of_the_protocol_is_needed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForgetfulSlots, "fault", fault)
    with pytest.raises(AssertionError, match=r"sequence \d, token"):
        for seed in range(10):
            with world(OrderedLine(LAYOUT.num_layers, is_late=fault != "order"), seed, ForgetfulSlots) as one:
                live(one, 60)
