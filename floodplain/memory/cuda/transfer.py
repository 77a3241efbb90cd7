"""Copies on a GPU: ``submit`` enqueues them on the stream of their direction, and the copy thread waits for them.

Memory of a copy's slots is kept in place from ``submit`` to the end of the copy, and released by the copy thread:
memory that must be returned now waits for the copies that are under way there, and never for the step loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.copy_engine import CopyEngine, Pass
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots
from floodplain.memory.transfer import (
    Batch,
    BlockCopy,
    BlockStore,
    CopyResult,
    judge_inbound,
    judge_outbound,
    split_into_batches,
)


class Mark(Protocol):
    """The end of copies that were enqueued on a stream."""

    def wait(self) -> tuple[np.ndarray, float]:
        """Wait for the end, on any thread; returns digests, int64 [n] in the order of the rows, and seconds taken."""


class Stream(Protocol):
    """Copies of one direction, one after another, beside everything else: a ``CudaStream``.

    Attributes:
        staging_blocks: Most blocks of a batch.
    """

    staging_blocks: int

    def run(self, batches: Sequence[Batch]) -> Mark:
        """Begin to copy, and return at once."""

    def drain(self) -> None:
        """Wait for all copies that were begun."""

    def close(self) -> None:
        """Wait for all copies that were begun, and free staging."""


@dataclass(frozen=True, slots=True)
class CudaJob:
    """A copy under way.

    Attributes:
        transfer_id: The id that was submitted.
        copy: The copy that was submitted.
        order: Which of the copy's blocks each digest belongs to; slots without memory have none.
        expected: The digests of its slots when it began: int64 [n].
        mark: Its end; None if none of its slots has memory.
        held: Keeps the slots' memory where it is.
    """

    transfer_id: int
    copy: BlockCopy
    order: np.ndarray
    expected: np.ndarray
    mark: Mark | None
    held: ExitStack


class CudaLane:
    """A ``Lane`` that copies on a CUDA stream.

    Args:
        store: Its blocks are copied.
        slots: The slots that they are copied to and from.
        stream: Stream of the lane's direction.
    """

    most_jobs: float = 1

    def __init__(self, store: BlockStore, slots: Slots, stream: Stream) -> None:
        self._store, self._slots, self._stream = store, slots, stream

    def begin(self, transfer_id: int, copy: BlockCopy) -> CudaJob:
        """Enqueue a copy behind the work that is on the current stream now, and return at once."""
        slots = np.asarray(copy.slots, dtype=np.int64)
        with ExitStack() as held:
            is_there = held.enter_context(self._slots.use(slots))
            expected = self._slots.digests[slots]
            if copy.direction is Direction.OUTBOUND:
                self._slots.digests[slots] = EMPTY_DIGEST
            order, mark = self._enqueue(copy, np.flatnonzero(is_there))
            return CudaJob(transfer_id, copy, order, expected, mark, held.pop_all())

    def finish(self, jobs: Sequence[CudaJob]) -> Pass:
        """Wait for the copy. Its slots' memory is released even if the device is lost: no copy is under way then."""
        (job,) = jobs
        with job.held:
            return self._settle(job)

    def close(self) -> None:
        """Wait for all copies, and free staging."""
        self._stream.close()

    def _enqueue(self, copy: BlockCopy, there: np.ndarray) -> tuple[np.ndarray, Mark | None]:
        """Enqueue the blocks at these places of the copy; returns their order on the stream, and the end."""
        if not len(there):
            return there, None
        blocks, slots = (tuple(ids[i] for i in there) for ids in (copy.blocks, copy.slots))
        part = BlockCopy(copy.direction, blocks, slots)
        batches = list(split_into_batches(part, self._stream.staging_blocks))
        try:
            mark = self._stream.run(batches)
        except BaseException:
            self._stream.drain()  # a part may be under way, and the memory is released next
            raise
        return there[np.concatenate([batch.order for batch in batches])], mark

    def _settle(self, job: CudaJob) -> Pass:
        """Wait for a copy, and store the digests of its slots while their memory is kept."""
        copy, time = job.copy, None
        found = np.full(len(copy.blocks), EMPTY_DIGEST, dtype=np.int64)  # of a slot that has no memory any more
        if job.mark is not None:
            found[job.order], duration_s = job.mark.wait()
            time = CopyTime(self._slots.tier, copy.direction, 1, len(job.order), duration_s)
        if copy.direction is Direction.OUTBOUND:
            self._slots.digests[list(copy.slots)] = found
        return Pass([(0.0, self._judge(job, found))], time)

    def _judge(self, job: CudaJob, found: np.ndarray) -> CopyResult:
        num_bytes = len(found) * self._store.layout.block_bytes
        if job.copy.direction is Direction.INBOUND:
            return judge_inbound(job.transfer_id, num_bytes, job.expected, found)
        return judge_outbound(job.transfer_id, num_bytes, found)


class CudaTransferEngine(CopyEngine[CudaJob]):
    """A ``CopyEngine`` whose blocks move over a GPU; ``cuda.copies`` makes one.

    Args:
        store: Its blocks are copied.
        slots: The slots that they are copied to and from.
        open_stream: Makes the stream of a direction.
    """

    def __init__(self, store: BlockStore, slots: Slots, open_stream: Callable[[Direction], Stream]) -> None:
        super().__init__(store, slots, lambda direction: CudaLane(store, slots, open_stream(direction)))
