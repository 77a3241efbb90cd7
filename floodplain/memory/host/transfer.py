"""The transfer engine of the host: one copy thread per direction."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Self

import numpy as np

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.block_mover import open_mover
from floodplain.memory.host.device import open_private_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.runs import find_runs
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots, SwapSlots
from floodplain.memory.transfer import (
    BlockCopy,
    BlockStore,
    CopyResult,
    Direction,
    LinkUse,
    Pacer,
    check_copy,
    judge_inbound,
    judge_outbound,
)

logger = logging.getLogger(__name__)

MEASURED_BLOCKS, MEASURED_BYTES = 64, 64 * 2**20
"""How much is copied to measure bandwidth, at most."""


@dataclass(frozen=True, slots=True)
class Job:
    """One copy.

    Attributes:
        ready_s: When it may be said to have ended: its bytes are on the modelled link until then.
        link_s: How long they are.
    """

    transfer_id: int
    copy: BlockCopy
    ready_s: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pass:
    """What came of the jobs that a copy thread did at once: when each is ready, and how it went."""

    results: list[tuple[float, CopyResult]]
    use: LinkUse


class HostTransferEngine:
    """See ``TransferEngine``.

    On a machine whose cores all compute, each time that a copy thread wakes up it holds a step up. So it takes all jobs
    that are there at once, and never sleeps until bytes have crossed a modelled link: results wait instead.

    Args:
        pool: Its blocks move.
        slots: Where to.
        link: Paces the copies; None lets them run as fast as this machine does.
    """

    def __init__(self, pool: BlockStore, slots: Slots, link: Pacer | None = None) -> None:
        self._pool = pool
        self._slots = slots
        self._link = link
        self._jobs: dict[Direction, SimpleQueue[Job | None]] = {d: SimpleQueue() for d in Direction}
        self._copied: SimpleQueue[Pass | BaseException] = SimpleQueue()
        self._arriving: list[tuple[float, CopyResult]] = []
        self._uses: list[LinkUse] = []
        self._num_in_flight = 0
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(direction,), name=f"copy-{direction.value}", daemon=True)
            for direction in Direction
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
        while not self._copied.empty():
            if isinstance(copied := self._copied.get(), BaseException):
                logger.error("a copy thread had ended with an error", exc_info=copied)

    @property
    def num_in_flight(self) -> int:
        """See ``TransferEngine``."""
        return self._num_in_flight

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """See ``TransferEngine``."""
        self._expect_alive()
        check_copy(copy, self._pool, self._slots)
        ready_s, link_s = self._link.book(copy.direction, self._sizes(copy)) if self._link else (0.0, 0.0)
        self._num_in_flight += 1
        self._jobs[copy.direction].put(Job(transfer_id, copy, ready_s, link_s))

    def poll(self) -> list[CopyResult]:
        """See ``TransferEngine``."""
        return self.wait(timeout_s=0)

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """See ``TransferEngine``."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._collect(0)
        while not (results := self._take_arrived()) and self._num_in_flight and time.monotonic() < end_s:
            self._collect(min(end_s, *(ready_s for ready_s, _ in self._arriving), math.inf) - time.monotonic())
        return results

    def take_link_uses(self) -> list[LinkUse]:
        """See ``TransferEngine``."""
        uses, self._uses = self._uses, []
        return uses

    # -- inside ----------------------------------------------------------------------------------------------------

    def _sizes(self, copy: BlockCopy) -> list[int]:
        """Bytes of each piece that goes over the link: adjacent slots travel together."""
        return [count * self._pool.layout.block_bytes for _, count in find_runs(sorted(copy.slots))]

    def _collect(self, timeout_s: float) -> None:
        """Take what the copy threads are done with, waiting for it if that can come; else until the time is over."""
        self._expect_alive()
        if self._num_in_flight == len(self._arriving):
            if self._arriving and timeout_s > 0:
                time.sleep(timeout_s)
            return
        with suppress(Empty):
            copied = self._copied.get(timeout=None if timeout_s == math.inf else max(0.0, timeout_s))
            while True:
                if isinstance(copied, BaseException):
                    self._failure = copied
                    break
                self._arriving += copied.results
                self._uses.append(copied.use)
                copied = self._copied.get_nowait()
        self._expect_alive()

    def _expect_alive(self) -> None:
        """No copy ends any more when a copy thread has: every caller must hear of it.

        Raises:
            InvariantError: With what ended it.
        """
        if self._failure is not None:
            raise InvariantError(f"a copy thread ended with {self._failure!r}") from self._failure

    def _take_arrived(self) -> list[CopyResult]:
        now = time.monotonic()
        arrived = [result for ready_s, result in self._arriving if ready_s <= now]
        if arrived:
            self._arriving = [one for one in self._arriving if one[0] > now]
            self._num_in_flight -= len(arrived)
        return arrived

    def _run(self, direction: Direction) -> None:
        """Body of a copy thread. A bug in it is raised where copies are asked for, and ends the process there."""
        try:
            copier, jobs, is_open = HostCopier(self._pool, self._slots), self._jobs[direction], True
            while is_open:
                batch = [jobs.get()]
                while not jobs.empty():
                    batch.append(jobs.get())
                is_open = None not in batch
                if jobs_there := [job for job in batch if job is not None]:
                    self._copied.put(copier.run(direction, jobs_there))
        except BaseException as error:
            self._copied.put(error)


class HostCopier:
    """Copies in the calling thread. See ``HostTransferEngine``."""

    def __init__(self, pool: BlockStore, slots: Slots) -> None:
        self._slots = slots
        self._mover = open_mover(pool, slots)
        self._block_bytes = pool.layout.block_bytes

    def run(self, direction: Direction, jobs: Sequence[Job]) -> Pass:
        """Do all jobs of one direction in one pass, which takes as long as here, or as on the modelled link."""
        begin_s = time.perf_counter()
        blocks = np.array([block for job in jobs for block in job.copy.blocks], dtype=np.int64)
        slots = np.array([slot for job in jobs for slot in job.copy.slots], dtype=np.int64)
        with self._slots.use(slots) as is_there:
            expected = self._slots.digests[slots]
            if direction is Direction.OUTBOUND:
                self._slots.digests[slots] = EMPTY_DIGEST
            found = np.full(len(blocks), EMPTY_DIGEST, dtype=np.int64)  # of a slot that has no memory any more
            if is_there.any():
                found[is_there] = self._mover.move(direction, blocks[is_there], slots[is_there])
            if direction is Direction.OUTBOUND:
                self._slots.digests[slots] = expected = found
        results, end = [], 0
        for job in jobs:
            part = slice(end, end := end + len(job.copy.blocks))
            results.append((job.ready_s, self._judge(job, expected[part], found[part])))
        duration_s = max(time.perf_counter() - begin_s, sum(job.link_s for job in jobs))
        return Pass(results, LinkUse(direction, len(jobs), len(blocks), duration_s))

    def _judge(self, job: Job, expected: np.ndarray, found: np.ndarray) -> CopyResult:
        num_bytes = len(found) * self._block_bytes
        if job.copy.direction is Direction.INBOUND:
            return judge_inbound(job.transfer_id, num_bytes, expected, found)
        return judge_outbound(job.transfer_id, num_bytes, found)


def measure_copy_bandwidth(layout: KVLayout, num_repeats: int = 5) -> float:
    """Bytes per second of gather, digest, copy and scatter here: the best of several tries, the slower direction.

    Nothing paces the copies: this is what ``cost.link.common_scale`` wants. It takes three times what is copied.

    Raises:
        UserError: There is not that much memory.
    """
    num_blocks = max(1, min(MEASURED_BLOCKS, MEASURED_BYTES // layout.block_bytes))
    num_bytes = num_blocks * layout.block_bytes
    with open_private_device(2 * num_bytes + 2**24 * layout.num_layers) as device:
        pool = KVPool(device, layout, num_blocks)
        if pool.grow(BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks), num_blocks) is None:
            raise UserError(f"there are no {2 * num_bytes} bytes to measure copies with: free memory for --hardware")
        copier = HostCopier(pool, SwapSlots(layout, num_blocks))
        ids = tuple(range(num_blocks))
        best_s = [
            min(_time_s(copier, BlockCopy(direction, ids, ids)) for _ in range(num_repeats))
            for direction in (Direction.OUTBOUND, Direction.INBOUND)
        ]
    return num_bytes / max(best_s)


def _time_s(copier: HostCopier, copy: BlockCopy) -> float:
    start = time.perf_counter()
    copier.run(copy.direction, [Job(0, copy)])
    return time.perf_counter() - start
