"""The compiled mover against numpy's: the same bytes in the same places, and digests that match the definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.blocks import BlockLedger
from floodplain.core.tiers import Direction
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.transfer import SOURCE, NativeMover, NumpyMover, open_mover
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.native import build
from floodplain.memory.swap_slots import SwapSlots

NUM_BLOCKS, NUM_SLOTS = 12, 8
LAYOUTS = [
    KVLayout(num_layers=3, block_tokens=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16),
    KVLayout(num_layers=2, block_tokens=1, num_kv_heads=3, head_dim=3, dtype=torch.float32),  # no whole vector
    KVLayout(num_layers=1, block_tokens=16, num_kv_heads=4, head_dim=13, dtype=torch.float32),
]


@contextmanager
def full_pool(layout: KVLayout, seed: int) -> Iterator[tuple[KVPool, SwapSlots]]:
    """A pool and slots with random words, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with open_private_device(2**22) as device:
        pool, slots = KVPool(device, layout, NUM_BLOCKS), SwapSlots(layout, NUM_SLOTS)
        pool.grow(BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        for words in [*(layer[:NUM_BLOCKS] for layer in pool.words), slots.words]:
            words[:] = torch.randint(-(2**31), 2**31, tuple(words.shape), generator=generator).int()
        yield pool, slots
        pool.close()


def native_mover(pool: KVPool, slots: SwapSlots) -> NativeMover:
    library = build.load_library(SOURCE, "numpy")
    if library is None:
        pytest.skip("no C++ compiler here")
    return NativeMover(library, pool, slots)


def everything(pool: KVPool, slots: SwapSlots) -> list[torch.Tensor]:
    return [*(words[:NUM_BLOCKS].clone() for words in pool.words), slots.words.clone()]


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(Direction),
    st.permutations(range(NUM_BLOCKS)),
    st.permutations(range(NUM_SLOTS)),
    st.integers(1, NUM_SLOTS),
    st.integers(0, 2**20),
)
def test_both_movers_move_the_same(
    layout: KVLayout, direction: Direction, blocks: list[int], slots: list[int], count: int, seed: int
) -> None:
    outcomes = []
    for make in (NumpyMover, native_mover):
        with full_pool(layout, seed) as (pool, store):
            digests = make(pool, store).move(direction, np.array(blocks[:count]), np.array(slots[:count]))
            outcomes.append((digests.tolist(), everything(pool, store)))
    (by_numpy, expected), (by_native, found) = outcomes
    assert by_native == by_numpy
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("extreme", [-(2**31), 2**31 - 1, -1, 0])
def test_digests_of_extreme_words_wrap_alike(extreme: int) -> None:
    with full_pool(LAYOUTS[0], 0) as (pool, slots):
        slots.words[:] = extreme
        order = np.arange(NUM_SLOTS)
        found = [m(pool, slots).move(Direction.INBOUND, order, order).tolist() for m in (NumpyMover, native_mover)]
    assert found[0] == found[1]
    assert len(set(found[0])) == 1


def test_without_a_compiler_numpy_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.DISABLE_VARIABLE, "1")
    build.load_library.cache_clear()
    try:
        with full_pool(LAYOUTS[0], 0) as (pool, slots):
            assert isinstance(open_mover(pool, slots), NumpyMover)
    finally:
        build.load_library.cache_clear()
