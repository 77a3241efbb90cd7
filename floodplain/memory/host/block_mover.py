"""Moves blocks between a host's KV pool and slots in the calling thread, and computes their digests.

Neither mover uses torch's thread pool, so that copies never wait for compute.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from floodplain.core.tiers import Direction
from floodplain.memory.digest import SEED, compute_digests, compute_weights
from floodplain.memory.native.build import load_library
from floodplain.memory.swap_slots import Slots
from floodplain.memory.transfer import BlockStore

SOURCE = Path(__file__).parents[1] / "native" / "copy.cpp"
_STAGING_BYTES = 4 * 2**20
"""Staging that stays in the CPU caches is 1.5 times as fast as a large one."""


class NativeMover:
    """Moves blocks by C++ (``native/copy.cpp``), in one pass over the bytes, without Python's lock."""

    def __init__(self, library: ctypes.CDLL, pool: BlockStore, slots: Slots) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._move = library.move_blocks
        self._move.argtypes = [*[pointer] * 4, *[count] * 3, ctypes.c_int, ctypes.c_uint64]
        self._move.restype = None
        self._pool, self._slots = pool, slots
        self._sizes = (len(pool.words), pool.words[0].shape[1])
        self._read_addresses()

    def move(self, direction: Direction, blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Copy ``blocks[i]`` to (OUTBOUND) or from (INBOUND) ``slots[i]``, int64 [n]; returns digests, int64 [n]."""
        if self._words is not self._pool.words:
            self._read_addresses()
        blocks, addresses = np.ascontiguousarray(blocks, dtype=np.int64), self._slots.addresses(slots)
        digests = np.empty(len(blocks), dtype=np.int64)
        self._move(
            self._layers.ctypes.data, addresses.ctypes.data, blocks.ctypes.data, digests.ctypes.data,
            len(blocks), *self._sizes, direction is Direction.OUTBOUND, SEED,
        )  # fmt: skip
        return digests

    def _read_addresses(self) -> None:
        """Read the layers' addresses. ``_words`` is set last: another thread that finds it current uses them."""
        words = self._pool.words
        self._layers = np.array([one.data_ptr() for one in words], dtype=np.uint64)
        self._words = words


class NumpyMover:
    """Moves blocks by NumPy where nothing can be compiled: gather into a small staging buffer, digest, copy."""

    def __init__(self, pool: BlockStore, slots: Slots) -> None:
        num_layers, layer_words = len(pool.words), pool.words[0].shape[1]
        self._pool, self._slots = pool, slots
        num_rows = max(1, _STAGING_BYTES // pool.layout.block_bytes)
        self._staging = np.empty((num_rows, num_layers, layer_words), dtype=np.int32)
        self._weights = compute_weights(num_layers * layer_words)

    def move(self, direction: Direction, blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Copy blocks to or from slots as ``NativeMover.move``; returns digests, int64 [n]."""
        digests = np.empty(len(blocks), dtype=np.int64)
        move_some = self._move_out if direction is Direction.OUTBOUND else self._move_in
        for start in range(0, len(blocks), len(self._staging)):
            some = slice(start, start + len(self._staging))
            digests[some] = move_some(blocks[some], slots[some])
        return digests

    def _move_out(self, blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        staging = self._staging[: len(blocks)]
        for layer, words in enumerate(self._pool.words):
            staging[:, layer] = words.numpy()[blocks]
        for row, slot in enumerate(slots.tolist()):
            self._slots.part(slot, 1).numpy().reshape(staging[row].shape)[:] = staging[row]
        return compute_digests(staging.reshape(len(staging), -1), self._weights)

    def _move_in(self, blocks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        staging = self._staging[: len(blocks)]
        for row, slot in enumerate(slots.tolist()):
            staging[row] = self._slots.part(slot, 1).numpy().reshape(staging[row].shape)
        for layer, words in enumerate(self._pool.words):
            words.numpy()[blocks] = staging[:, layer]
        return compute_digests(staging.reshape(len(staging), -1), self._weights)


def open_mover(pool: BlockStore, slots: Slots) -> NativeMover | NumpyMover:
    """The fastest mover that this machine can run: a native one, or NumPy's where nothing can be compiled."""
    library = load_library(SOURCE, "numpy")
    return NumpyMover(pool, slots) if library is None else NativeMover(library, pool, slots)
