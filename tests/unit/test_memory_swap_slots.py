"""Swap slots: which memory is page-locked for CUDA until when, and digests of what lies there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.memory.digest import SEED, compute_digests, compute_weights
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.swap_slots import SwapSlots

LAYOUT = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)
NUM_SLOTS = 3


class Runtime:
    """Fake locking of the CUDA runtime; ``register`` returns ``status``."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.status = 0

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.status:
            self.locked[address] = num_bytes
        return self.status

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    one = Runtime()
    calls = SimpleNamespace(cudaHostRegister=one.register, cudaHostUnregister=one.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    yield one
    assert not one.locked


def test_exactly_the_slots_are_locked_until_they_are_closed(runtime: Runtime) -> None:
    slots = SwapSlots(LAYOUT, NUM_SLOTS, is_pinned=True)
    assert runtime.locked == {slots.words.data_ptr(): NUM_SLOTS * LAYOUT.block_bytes}
    slots.close()
    assert not runtime.locked
    slots.close()


def test_memory_that_the_system_does_not_lock_is_one_line(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.raises(UserError, match=r"locks no 1\.5 KiB of memory: lower --swap-memory"):
        SwapSlots(LAYOUT, NUM_SLOTS, is_pinned=True)


def test_slots_of_a_cpu_lock_nothing(runtime: Runtime) -> None:
    SwapSlots(LAYOUT, NUM_SLOTS).close()


# -- the digest detects flipped bits, swapped words and zeroing; it equals its definition ------------------------------


NUM_WORDS = 300
WEIGHTS = compute_weights(NUM_WORDS)
WORDS = st.integers(-(2**31), 2**31 - 1)
PLACES = st.integers(0, NUM_WORDS - 1)


def _block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, (1, NUM_WORDS), dtype=np.int32)


def _digest(block: np.ndarray) -> int:
    return int(compute_digests(block, WEIGHTS)[0])


@given(st.integers(0, 2**32))
def test_it_is_the_sum_of_its_definition(seed: int) -> None:
    block = _block(seed)
    total = SEED + sum(
        (2 * (place * 0x9E3779B1 % 2**30) + 1) * int(word) for place, word in enumerate(block[0].tolist())
    )
    assert _digest(block) % 2**64 == total % 2**64


@given(st.integers(0, 2**32), PLACES, st.integers(0, 31))
def test_a_flipped_bit_shows(seed: int, place: int, bit: int) -> None:
    block = _block(seed)
    flipped = block.copy()
    flipped.view(np.uint32)[0, place] ^= np.uint32(1 << bit)
    assert _digest(flipped) != _digest(block)


@given(st.integers(0, 2**32), PLACES, PLACES, WORDS, WORDS)
def test_words_that_change_places_show(seed: int, one: int, other: int, word: int, other_word: int) -> None:
    block = _block(seed)
    block[0, one], block[0, other] = word, other_word
    swapped = block.copy()
    swapped[0, [one, other]] = swapped[0, [other, one]]
    assert (_digest(swapped) != _digest(block)) == bool((swapped != block).any())


def test_zeroed_and_swapped_blocks_show() -> None:
    blocks = np.concatenate([_block(seed) for seed in range(50)])
    digests = compute_digests(blocks, WEIGHTS)
    assert len(set(digests.tolist())) == 50
    assert compute_digests(np.zeros_like(blocks), WEIGHTS).tolist() == [SEED] * 50
    assert SEED not in digests


def test_weights_are_distinct_odd_and_small() -> None:
    weights = compute_weights(2**18)
    assert len(np.unique(weights)) == 2**18
    assert (weights % 2 == 1).all()
    assert 0 < weights.min() <= weights.max() < 2**31
