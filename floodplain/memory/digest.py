"""A cheap proof that a block returns unchanged: a position-weighted sum of its 32-bit words, modulo 2**64.

    digest = SEED + sum of weight(i) * word[i]        weight(i) = 2 * (i * 0x9E3779B1 mod 2**30) + 1

Weights are distinct and in 1..2**31, words differ by less than 2**32: one changed word, or two exchanged ones, change
the sum by less than 2**63 and never by 0. The position counts over all layers. It is no defence against malice.
"""

from __future__ import annotations

import numpy as np

SEED = 0x5DEECE66D
"""The digest of zeros; not 0, so that a digest that was never computed cannot pass for one."""

WEIGHT_FACTOR = 0x9E3779B1
"""Odd, so that it permutes the positions modulo 2**30: adjacent words get weights that are far apart."""

WEIGHT_MASK = 2**30 - 1


def compute_weights(num_words: int) -> np.ndarray:
    """The weights of the positions of a block: int64 [num_words]."""
    positions = np.arange(num_words, dtype=np.int64)
    return ((positions * WEIGHT_FACTOR) & WEIGHT_MASK) * 2 + 1


def compute_digests(words: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Digests of blocks: int32 [num_blocks, num_words] to int64 [num_blocks]."""
    sums: np.ndarray = np.einsum("bw,w->b", words, weights)
    return sums + np.int64(SEED)
