"""The digest detects flipped bits, swapped words and zeroing; it equals its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from floodplain.memory.digest import SEED, compute_digests, compute_weights

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
