"""The transfer engine of a CUDA device: a stream for each direction, and a thread that waits for the copies on it.

What a copy uses of its slots is kept in place from ``submit`` to its end, and let go by that thread: memory that must
be given back now waits for the copies that are under way there, and never for the step loop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, Self

import numpy as np

from floodplain.core.errors import InvariantError
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots
from floodplain.memory.transfer import (
    Batch,
    BlockCopy,
    BlockStore,
    CopyResult,
    Direction,
    LinkUse,
    check_copy,
    judge_inbound,
    judge_outbound,
    split_into_batches,
)

logger = logging.getLogger(__name__)


class Mark(Protocol):
    """The end of what was put on a lane."""

    def wait(self) -> tuple[np.ndarray, float]:
        """Wait for it, on any thread; the digests, int64 [n] in the order of the rows, and the seconds it took."""


class Lane(Protocol):
    """Copies of one direction, one after another, beside everything else.

    Attributes:
        staging_blocks: Most blocks of a batch.
    """

    staging_blocks: int

    def run(self, batches: Sequence[Batch]) -> Mark:
        """Begin to copy, and return at once."""

    def drain(self) -> None:
        """Wait for all that was begun."""

    def close(self) -> None:
        """The same, and give staging back."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy under way.

    Attributes:
        transfer_id: Which one.
        copy: What was asked for.
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


class CudaTransferEngine:
    """See ``TransferEngine``. One thread submits and polls; ``cuda_copies`` makes one for a GPU.

    Args:
        store: Its blocks move.
        slots: Where to.
        open_lane: Makes the lane of a direction.
    """

    def __init__(self, store: BlockStore, slots: Slots, open_lane: Callable[[Direction], Lane]) -> None:
        self._store, self._slots = store, slots
        self._open_lane = open_lane
        self._lanes: dict[Direction, Lane] = {}
        self._pending: dict[Direction, SimpleQueue[_Pending | None]] = {d: SimpleQueue() for d in Direction}
        self._ended: SimpleQueue[tuple[CopyResult, LinkUse | None] | BaseException] = SimpleQueue()
        self._uses: list[LinkUse] = []
        self._num_in_flight = 0
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(direction,), name=f"copy-{direction.value}", daemon=True)
            for direction in Direction
        ]

    def start(self) -> Self:
        """Make streams and staging, and start the threads; returns the engine."""
        self._lanes = {direction: self._open_lane(direction) for direction in Direction}
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """See ``TransferEngine``. A second call does nothing."""
        for pending in self._pending.values():
            pending.put(None)
        for thread in self._threads:
            thread.join()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        while not self._ended.empty():
            if isinstance(ended := self._ended.get(), BaseException):
                logger.error("a copy thread had ended with an error", exc_info=ended)

    @property
    def num_in_flight(self) -> int:
        """See ``TransferEngine``."""
        return self._num_in_flight

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """See ``TransferEngine``: on a GPU the copy waits for what is on the current stream now."""
        self._expect_alive()
        check_copy(copy, self._store, self._slots)
        slots = np.asarray(copy.slots, dtype=np.int64)
        with ExitStack() as held:
            is_there = held.enter_context(self._slots.use(slots))
            expected = self._slots.digests[slots]
            if copy.direction is Direction.OUTBOUND:
                self._slots.digests[slots] = EMPTY_DIGEST
            order, mark = self._begin(copy, np.flatnonzero(is_there))
            self._pending[copy.direction].put(_Pending(transfer_id, copy, order, expected, mark, held.pop_all()))
        self._num_in_flight += 1

    def poll(self) -> list[CopyResult]:
        """See ``TransferEngine``."""
        return self.wait(timeout_s=0)

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """See ``TransferEngine``."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._expect_alive()
        results: list[CopyResult] = []
        while self._num_in_flight:
            try:
                left_s = 0.0 if results else max(0.0, end_s - time.monotonic())
                ended = self._ended.get(timeout=None if left_s == math.inf else left_s)
            except Empty:
                break
            if isinstance(ended, BaseException):
                self._failure = ended
                break
            results.append(ended[0])
            self._uses += [] if ended[1] is None else [ended[1]]
            self._num_in_flight -= 1
        self._expect_alive()
        return results

    def take_link_uses(self) -> list[LinkUse]:
        """See ``TransferEngine``."""
        uses, self._uses = self._uses, []
        return uses

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, copy: BlockCopy, there: np.ndarray) -> tuple[np.ndarray, Mark | None]:
        """Put the blocks at these places of the copy on its lane; their order there, and the end."""
        if not len(there):
            return there, None
        lane = self._lanes[copy.direction]
        part = BlockCopy(copy.direction, *(tuple(ids[i] for i in there) for ids in (copy.blocks, copy.slots)))
        batches = list(split_into_batches(part, lane.staging_blocks))
        try:
            mark = lane.run(batches)
        except BaseException:
            lane.drain()  # some of it may be under way, and the memory is let go next
            raise
        return there[np.concatenate([batch.order for batch in batches])], mark

    def _expect_alive(self) -> None:
        """No copy ends any more when a copy thread has: every caller must hear of it.

        Raises:
            InvariantError: With what ended it.
        """
        if self._failure is not None:
            raise InvariantError(f"a copy thread ended with {self._failure!r}") from self._failure

    def _run(self, direction: Direction) -> None:
        """Body of a copy thread. What it raises is raised where copies are asked for, and ends the process there.

        After that it goes on letting go: when a device is lost no copy is under way any more, and whoever waits for the
        memory must not wait for ever.
        """
        while (pending := self._pending[direction].get()) is not None:
            with pending.held:
                try:
                    self._ended.put(self._settle(pending))
                except BaseException as error:
                    self._ended.put(error)

    def _settle(self, pending: _Pending) -> tuple[CopyResult, LinkUse | None]:
        """Wait for a copy, and note what is known of its slots while their memory is still there."""
        copy, use = pending.copy, None
        found = np.full(len(copy.blocks), EMPTY_DIGEST, dtype=np.int64)  # of a slot that has no memory any more
        if pending.mark is not None:
            found[pending.order], duration_s = pending.mark.wait()
            use = LinkUse(copy.direction, 1, len(pending.order), duration_s)
        num_bytes = len(found) * self._store.layout.block_bytes
        if copy.direction is Direction.INBOUND:
            return judge_inbound(pending.transfer_id, num_bytes, pending.expected, found), use
        self._slots.digests[list(copy.slots)] = found
        return judge_outbound(pending.transfer_id, num_bytes, found), use
