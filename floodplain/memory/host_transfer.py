"""The transfer engine of the host: one copy thread per direction."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import Self

import numpy as np

from floodplain.core.blocks import BlockLedger
from floodplain.memory.block_mover import open_mover
from floodplain.memory.emulated_link import EmulatedLink
from floodplain.memory.host_device import open_private_device
from floodplain.memory.kv_pool import KVLayout, KVPool
from floodplain.memory.runs import find_runs
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import (
    BlockCopy,
    CopyResult,
    Direction,
    check_copy,
    judge_inbound,
)


class HostTransferEngine:
    """See ``TransferEngine``.

    Args:
        pool: Its blocks move.
        slots: Where to.
        link: Paces the copies; None lets them run as fast as this machine does.
    """

    def __init__(self, pool: KVPool, slots: SwapSlots, link: EmulatedLink | None = None) -> None:
        self._pool = pool
        self._slots = slots
        self._jobs: dict[Direction, SimpleQueue[tuple[int, BlockCopy] | None]] = {d: SimpleQueue() for d in Direction}
        self._results: SimpleQueue[CopyResult | BaseException] = SimpleQueue()
        self._num_in_flight = 0
        copiers = {d: HostCopier(pool, slots, link) for d in Direction}
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
    """Does one copy after another, in the calling thread. See ``HostTransferEngine``."""

    def __init__(self, pool: KVPool, slots: SwapSlots, link: EmulatedLink | None) -> None:
        self._slots = slots
        self._mover = open_mover(pool, slots)
        self._block_bytes = pool.layout.block_bytes
        self._link = link

    def run(self, transfer_id: int, copy: BlockCopy) -> CopyResult:
        """Copy, and return how it went."""
        num_bytes = len(copy.blocks) * self._block_bytes
        blocks, slots = np.asarray(copy.blocks, dtype=np.int64), np.asarray(copy.slots, dtype=np.int64)
        is_outbound = copy.direction is Direction.OUTBOUND
        expected = self._slots.digests[slots]
        if is_outbound:
            self._slots.digests[slots] = EMPTY_DIGEST
        with self._link.occupy(copy.direction, self._sizes(slots)) if self._link else nullcontext():
            found = self._mover.move(copy.direction, blocks, slots)
        if not is_outbound:
            return judge_inbound(transfer_id, num_bytes, expected, found)
        self._slots.digests[slots] = found
        return CopyResult(transfer_id, True, num_bytes, tuple(found.tolist()))

    def _sizes(self, slots: np.ndarray) -> list[int]:
        """Bytes of each copy over the link: adjacent slots travel together."""
        return [count * self._block_bytes for _, count in find_runs(np.sort(slots))]


def measure_copy_bandwidth(layout: KVLayout, num_blocks: int = 64, num_repeats: int = 5) -> float:
    """Bytes per second of gather, copy and scatter here with digests, the better of several tries; the slower direction counts.

    Nothing paces the copies: this is what ``cost.link.common_scale`` wants. It takes twice the blocks' memory.
    """
    num_bytes = num_blocks * layout.block_bytes
    with open_private_device(2 * num_bytes + 2**24 * layout.num_layers) as device:
        pool = KVPool(device, layout, num_blocks)
        pool.grow(BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks), num_blocks)
        copier = HostCopier(pool, SwapSlots(layout, num_blocks), None)
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
