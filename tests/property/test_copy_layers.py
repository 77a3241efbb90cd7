"""A copy may name a range of layers: it moves only those, and is verified by the digests of that range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction
from floodplain.memory import block_mover, layer_range
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyResult
from tests.support.examples import examples

LAYOUT = KVLayout(num_layers=8, block_tokens=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
NUM_BLOCKS, NUM_SLOTS = 12, 10
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
RANGES = st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda ends: ends[0] < ends[1])


@dataclass
class Bench:
    """A full pool, slots with a pattern in them, and an engine between them."""

    pool: KVPool
    slots: SwapSlots
    engine: HostTransferEngine

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for words in [*(words[:NUM_BLOCKS] for words in self.pool.words), self.slots.words]:
            words[:] = torch.randint(-(2**31), 2**31, words.shape, generator=generator).int()

    def read(self) -> torch.Tensor:
        """Return the whole pool: [blocks, layers, words]."""
        return torch.stack([words[:NUM_BLOCKS] for words in self.pool.words], dim=1)

    def copy(
        self, direction: Direction, blocks: tuple[int, ...], slots: tuple[int, ...], layers: range | None
    ) -> CopyResult:
        self.engine.submit(0, BlockCopy(direction, blocks, slots, layers))
        (result,) = self.engine.wait()
        return result


@pytest.fixture(scope="module", params=["native", "numpy"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Run with each mover that this machine has."""
    with pytest.MonkeyPatch.context() as patch, open_private_device(2**24) as device:
        if request.param == "numpy":
            patch.setattr(block_mover, "load_library", lambda *_: None)
        pool = KVPool(device, LAYOUT, NUM_BLOCKS)
        pool.grow(BlockLedger(0, 4, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        slots = SwapSlots(LAYOUT, NUM_SLOTS)
        engine = HostTransferEngine(pool, slots).start()
        yield Bench(pool, slots, engine)
        engine.close()
        pool.close()


def check_range(bench: Bench, blocks: tuple[int, ...], slots: tuple[int, ...], layers: range, seed: int) -> None:
    """Copy out, then in to blocks with other contents: only bytes of the range change in pool and slots."""
    bench.fill(seed)
    left, before = bench.read(), bench.slots.words.clone()
    result = bench.copy(OUT, blocks, slots, layers)
    assert result.is_whole and result.num_bytes == len(blocks) * len(layers) * LAYOUT.layer_block_bytes
    (copied,) = bench.engine.take_copy_times()
    assert copied.num_blocks == len(blocks) * len(layers) / LAYOUT.num_layers
    here = slice(layers.start, layers.stop)
    before[list(slots), here] = left[list(blocks), here]
    assert torch.equal(bench.slots.words, before)
    assert torch.equal(bench.read(), left)
    for words in bench.pool.words:
        words[:NUM_BLOCKS] = seed + 1
    expected = torch.full_like(left, seed + 1)
    assert bench.copy(IN, blocks, slots, layers).is_whole
    expected[list(blocks), here] = left[list(blocks), here]
    assert torch.equal(bench.read(), expected)
    assert torch.equal(bench.slots.words, before)


def test_a_copy_of_layers_3_to_5_moves_those_and_nothing_else(bench: Bench) -> None:
    check_range(bench, (7, 2, 11), (0, 1, 5), range(3, 5), seed=1)


@settings(max_examples=examples(20))
@given(
    blocks=st.permutations(range(NUM_BLOCKS)),
    slots=st.permutations(range(NUM_SLOTS)),
    count=st.integers(1, NUM_SLOTS),
    ends=RANGES,
    seed=st.integers(0, 2**16),
)
def test_a_copy_moves_the_layers_that_it_names_and_nothing_else(
    bench: Bench, blocks: list[int], slots: list[int], count: int, ends: tuple[int, int], seed: int
) -> None:
    bench.engine.take_copy_times()
    check_range(bench, tuple(blocks[:count]), tuple(slots[:count]), range(*ends), seed)


def test_ranges_of_one_block_are_proven_each_for_itself(bench: Bench) -> None:
    bench.fill(2)
    halves = range(4), range(4, 8)
    for layers in halves:
        assert bench.copy(OUT, (0, 1), (2, 3), layers).is_whole
    bench.slots.words[3, 6, 5] ^= 1
    assert bench.copy(IN, (0, 1), (2, 3), halves[0]).is_whole
    assert bench.copy(IN, (0, 1), (2, 3), halves[1]).lost == (1,)


@settings(max_examples=examples(30))
@given(first=RANGES, second=RANGES)
def test_a_digest_holds_until_one_of_its_layers_is_written(
    bench: Bench, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """A partly rewritten slot is not whole; a range that was written whole is valid by itself."""
    bench.fill(3)
    one, two = range(*first), range(*second)
    assert bench.copy(OUT, (4,), (6,), None).is_whole
    assert bench.copy(IN, (4,), (6,), one).problem == "a slot holds no whole block"
    assert bench.copy(OUT, (4,), (6,), one).is_whole
    assert bench.copy(IN, (4,), (6,), None).problem == "a slot holds no whole block"
    assert bench.copy(OUT, (5,), (6,), two).is_whole
    overlap = one != two and set(one) & set(two)
    assert bench.copy(IN, (4,), (6,), one).is_whole is not bool(overlap)


def test_a_layer_that_is_placed_elsewhere_is_copied_from_there(bench: Bench) -> None:
    bench.fill(5)
    assert bench.copy(OUT, (1,), (4,), range(3, 5)).is_whole
    bench.pool.place_layer(3, torch.full_like(bench.pool.words[3], 7))
    assert bench.copy(OUT, (1,), (4,), range(3, 5)).is_whole
    bench.pool.place_layer(3, None)
    assert bool((bench.slots.words[4, 3] == 7).all())
    assert torch.equal(bench.slots.words[4, 4], bench.pool.words[4][1])


@pytest.mark.parametrize("layers", [range(0), range(5, 3), range(-1, 2), range(7, 9), range(0, 8, 2)])
def test_layers_that_are_not_there_are_refused(bench: Bench, layers: range) -> None:
    with pytest.raises(InvariantError, match="of 8 layers"):
        bench.copy(OUT, (0,), (0,), layers)


def test_a_copy_of_other_layers_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: in the slots every range begins at the first layer."""
    bench.engine.take_copy_times()
    monkeypatch.setattr(layer_range.LayersOfSlots, "addresses", lambda part, slots: part._slots.addresses(slots))
    shifted = layer_range.LayersOfSlots
    monkeypatch.setattr(shifted, "addresses", lambda part, slots: part._slots.addresses(slots))
    monkeypatch.setattr(shifted, "part", lambda part, *ends: part._slots.part(*ends)[:, : len(part._layers)])
    with pytest.raises(AssertionError):
        check_range(bench, (7, 2), (0, 1), range(2, 6), seed=4)
