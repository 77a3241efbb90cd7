"""The transfer engine of the host: one copy thread per direction."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import Self

import numpy as np

from floodplain.core.blocks import BlockLedger
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.emulated_link import EmulatedLink
from floodplain.memory.host_device import open_private_device
from floodplain.memory.kv_pool import KVLayout, KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import (
    Batch,
    BlockCopy,
    CopyResult,
    Direction,
    check_copy,
    judge_inbound,
    split_into_batches,
)


class HostTransferEngine:
    """See ``TransferEngine``. The copy threads use numpy, which takes no part in torch's thread pool.

    Args:
        pool: Its blocks move.
        slots: Where to.
        staging_blocks: Blocks that one copy over the link carries at most.
        link: Paces the copies; None lets them run as fast as this machine does.
    """

    def __init__(self, pool: KVPool, slots: SwapSlots, staging_blocks: int, link: EmulatedLink | None = None) -> None:
        self._pool = pool
        self._slots = slots
        self._jobs: dict[Direction, SimpleQueue[tuple[int, BlockCopy] | None]] = {d: SimpleQueue() for d in Direction}
        self._results: SimpleQueue[CopyResult | BaseException] = SimpleQueue()
        self._num_in_flight = 0
        copiers = {d: HostCopier(pool, slots, staging_blocks, link) for d in Direction}
        self._threads = [
            threading.Thread(target=self._run, args=(copiers[d], self._jobs[d]), name=f"copy-{d.value}", daemon=True)
            for d in Direction
        ]

    def start(self) -> Self:
        """Start the copy threads; returns the engine."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """See ``TransferEngine``."""
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def num_in_flight(self) -> int:
        """See ``TransferEngine``."""
        return self._num_in_flight

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """See ``TransferEngine``."""
        check_copy(copy, self._pool, self._slots)
        self._num_in_flight += 1
        self._jobs[copy.direction].put((transfer_id, copy))

    def poll(self) -> list[CopyResult]:
        """See ``TransferEngine``."""
        return self.wait(timeout_s=0)

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """See ``TransferEngine``."""
        results: list[CopyResult] = []
        while self._num_in_flight:
            try:
                result = self._results.get(timeout=0 if results else timeout_s)
            except Empty:
                break
            if isinstance(result, BaseException):
                raise result
            results.append(result)
            self._num_in_flight -= 1
        return results

    def _run(self, copier: HostCopier, jobs: SimpleQueue[tuple[int, BlockCopy] | None]) -> None:
        """Body of a copy thread. A bug in it is raised where results are taken, so that it ends the process there."""
        while (job := jobs.get()) is not None:
            try:
                self._results.put(copier.run(*job))
            except BaseException as error:
                self._results.put(error)
                return


class HostCopier:
    """Does one copy after another through its own staging buffer, in the calling thread. See ``HostTransferEngine``."""

    def __init__(self, pool: KVPool, slots: SwapSlots, staging_blocks: int, link: EmulatedLink | None) -> None:
        layout = pool.layout
        self._layers = [words.numpy() for words in pool.words]
        self._slots = slots
        self._slot_words = slots.words.numpy()
        self._staging = np.empty((staging_blocks, layout.num_layers, layout.layer_block_words), dtype=np.int32)
        self._weights = compute_weights(layout.num_layers * layout.layer_block_words)
        self._block_bytes = layout.block_bytes
        self._link = link

    def run(self, transfer_id: int, copy: BlockCopy) -> CopyResult:
        """Copy, and return how it went."""
        num_bytes = len(copy.blocks) * self._block_bytes
        slots = np.asarray(copy.slots)
        is_outbound = copy.direction is Direction.OUTBOUND
        expected = self._slots.digests[slots]
        if is_outbound:
            self._slots.digests[slots] = EMPTY_DIGEST
        found = np.empty(len(slots), dtype=np.int64)
        for batch in split_into_batches(copy, len(self._staging)):
            sizes = [count * self._block_bytes for _, _, count in batch.runs]
            with self._link.occupy(copy.direction, sizes) if self._link else nullcontext():
                found[batch.order] = self._move_out(batch) if is_outbound else self._move_in(batch)
        if not is_outbound:
            return judge_inbound(transfer_id, num_bytes, expected, found)
        self._slots.digests[slots] = found
        return CopyResult(transfer_id, True, num_bytes, tuple(found.tolist()))

    def _move_out(self, batch: Batch) -> np.ndarray:
        staging = self._staging[: len(batch.blocks)]
        for layer, words in enumerate(self._layers):
            staging[:, layer] = words[batch.blocks]
        digests = compute_digests(staging.reshape(len(staging), -1), self._weights)
        for row, slot, count in batch.runs:
            self._slot_words[slot : slot + count] = staging[row : row + count]
        return digests

    def _move_in(self, batch: Batch) -> np.ndarray:
        staging = self._staging[: len(batch.blocks)]
        for row, slot, count in batch.runs:
            staging[row : row + count] = self._slot_words[slot : slot + count]
        digests = compute_digests(staging.reshape(len(staging), -1), self._weights)
        for layer, words in enumerate(self._layers):
            words[batch.blocks] = staging[:, layer]
        return digests


def measure_copy_bandwidth(layout: KVLayout, num_blocks: int = 64, num_repeats: int = 5) -> float:
    """Bytes per second of gather, copy and scatter here, the better of several tries; the slower direction counts.

    Nothing paces the copies: this is what ``cost.link.common_scale`` wants. It takes twice the blocks' memory.
    """
    num_bytes = num_blocks * layout.block_bytes
    with open_private_device(2 * num_bytes + 2**24 * layout.num_layers) as device:
        pool = KVPool(device, layout, num_blocks)
        pool.grow(BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks), num_blocks)
        copier = HostCopier(pool, SwapSlots(layout, num_blocks), num_blocks, None)
        ids = tuple(range(num_blocks))
        best_s = [
            min(_time_s(copier, BlockCopy(direction, ids, ids)) for _ in range(num_repeats))
            for direction in (Direction.OUTBOUND, Direction.INBOUND)
        ]
    return num_bytes / max(best_s)


def _time_s(copier: HostCopier, copy: BlockCopy) -> float:
    start = time.perf_counter()
    copier.run(0, copy)
    return time.perf_counter() - start
