"""Copies on the host: in the copy thread of each direction, as fast as this machine copies or as a modelled link.

Blocks move in the calling thread, not in torch's thread pool, so that copies never wait for compute.
"""

from __future__ import annotations

import ctypes
import math
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size
from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.digest import SEED, compute_digests, compute_weights
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.emulated_link import EmulatedLink, LinkPair
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.native.build import load_library
from floodplain.memory.runs import find_runs
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots, SwapSlots
from floodplain.memory.transfer import BlockCopy, BlockStore, CopyEngine, CopyResult, Pass, judge_copy

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


MEASURED_BLOCKS, MEASURED_BYTES = 64, 64 * 2**20
"""The most blocks and bytes that are copied to measure bandwidth."""


@dataclass(frozen=True, slots=True)
class HostJob:
    """One copy, on the modelled link for ``link_s`` seconds; its result may be reported from ``ready_s`` on."""

    transfer_id: int
    copy: BlockCopy
    ready_s: float = 0.0
    link_s: float = 0.0


class HostLane:
    """A ``Lane`` that copies in the calling thread, paced by ``link``, or as fast as this machine does.

    If all cores of a machine compute, each wake-up of a copy thread delays a step. So a pass takes all jobs that are
    queued, and the thread never sleeps until bytes have crossed a modelled link: results wait instead.
    """

    most_jobs: float = math.inf

    def __init__(
        self, direction: Direction, store: BlockStore, slots: Slots, link: EmulatedLink | LinkPair | None = None
    ) -> None:
        self._direction = direction
        self._store, self._slots = store, slots
        self._link = link
        self._mover = open_mover(store, slots)

    def begin(self, transfer_id: int, copy: BlockCopy) -> HostJob:
        """Book a copy on the modelled link, if there is one, and return at once."""
        ready_s, link_s = self._link.book(copy.direction, self._sizes(copy)) if self._link else (0.0, 0.0)
        return HostJob(transfer_id, copy, ready_s, link_s)

    def finish(self, jobs: Sequence[HostJob]) -> Pass:
        """Do all jobs in one pass. Its time is that of the copies here, or of the modelled link if that is longer."""
        begin_s = time.perf_counter()
        results = self._move(jobs)
        duration_s = max(time.perf_counter() - begin_s, sum(job.link_s for job in jobs))
        num_blocks = sum(result.num_bytes for _, result in results) / self._store.layout.block_bytes
        return Pass(results, CopyTime(self._slots.tier, self._direction, len(jobs), num_blocks, duration_s))

    def close(self) -> None:
        """Do nothing: the lane holds nothing."""

    def _move(self, jobs: Sequence[HostJob]) -> list[tuple[float, CopyResult]]:
        blocks = np.array([block for job in jobs for block in job.copy.blocks], dtype=np.int64)
        slots = np.array([slot for job in jobs for slot in job.copy.slots], dtype=np.int64)
        digests, is_outbound = self._slots.digests, self._direction is Direction.OUTBOUND
        with self._slots.use(slots) as is_there:
            expected = digests[slots]
            if is_outbound:
                digests[slots] = EMPTY_DIGEST  # until the copy has ended: if it fails, the slots hold no whole block
            found = np.full(len(blocks), EMPTY_DIGEST, dtype=np.int64)  # of a slot that has no memory any more
            if is_there.any():
                found[is_there] = self._mover.move(self._direction, blocks[is_there], slots[is_there])
            if is_outbound:
                digests[slots] = expected = found
        results, end = [], 0
        for job in jobs:
            part = slice(end, end := end + len(job.copy.blocks))
            num_bytes = len(job.copy.blocks) * self._store.layout.block_bytes
            result = judge_copy(job.transfer_id, self._direction, num_bytes, expected[part], found[part])
            results.append((job.ready_s, result))
        return results

    def _sizes(self, copy: BlockCopy) -> list[int]:
        """Bytes of each copy over the link: adjacent slots are one copy."""
        return [count * self._store.layout.block_bytes for _, count in find_runs(sorted(copy.slots))]


class HostTransferEngine(CopyEngine[HostJob]):
    """A ``CopyEngine`` whose blocks and slots are in this machine's memory, with a ``HostLane`` each way."""

    def __init__(self, store: BlockStore, slots: Slots, link: EmulatedLink | LinkPair | None = None) -> None:
        super().__init__(store, slots, lambda direction: HostLane(direction, store, slots, link))


def measure_copy_bandwidth(layout: KVLayout) -> float:
    """Bytes per second of unpaced copies here: the best of several tries, the slower direction.

    It takes three times the memory of what is copied, and raises ``UserError`` without it.
    """
    num_blocks = count_measured(layout)
    num_bytes = num_blocks * layout.block_bytes
    with open_private_device(2 * num_bytes + 2**24 * layout.num_layers) as device:
        pool = KVPool(device, layout, num_blocks)
        if pool.grow(BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks), num_blocks) is None:
            raise UserError(
                f"there are no {show_size(2 * num_bytes)} to measure copies with: free memory for --hardware"
            )
        slots, ids = SwapSlots(layout, num_blocks), tuple(range(num_blocks))
        best_s = []
        for direction in Direction:
            lane, jobs = HostLane(direction, pool, slots), [HostJob(0, BlockCopy(direction, ids, ids))]
            best_s.append(min(timeit.repeat(partial(lane.finish, jobs), number=1, repeat=5)))
    return num_bytes / max(best_s)


def measure_plain_bandwidth(num_bytes: int) -> float:
    """Bytes per second of a plain copy of so many bytes in the calling thread: the best of several tries."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.empty(num_bytes, dtype=np.uint8)
    return num_bytes / min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=5))


def count_measured(layout: KVLayout) -> int:
    """Number of the blocks that ``measure_copy_bandwidth`` moves."""
    return max(1, min(MEASURED_BLOCKS, MEASURED_BYTES // layout.block_bytes))
