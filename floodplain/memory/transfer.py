"""Copies of blocks between a KV pool and slots, beside compute, and the engine behind them.

Slots are block-major, [blocks, layers, words of a layer's part]: a block is one piece of memory with one digest, and
blocks for adjacent slots are one copy. A *lane* copies in one direction. Its ``begin`` runs on the thread that submits;
its ``finish``, which takes time, runs on the copy thread of its direction.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
"""A lane's own record of a copy that has begun."""


class BlockStore(Protocol):
    """Blocks, shaped by ``layout``, that are copied to and from slots: the KV pool, or slots of another tier."""

    layout: KVLayout

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """A tensor for each layer, int32 [blocks, words of a layer's part of a block]; a new tuple if one changes."""

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Raise ``InvariantError`` unless blocks have memory: copying from none would crash the process."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy these blocks to (OUTBOUND) or from (INBOUND) these slots, pair by pair."""

    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a copy ended.

    ``lost``: places in ``BlockCopy.blocks`` of the blocks that did not arrive as they left, ascending. ``digests``: of
    each block as it was copied, in the order of ``BlockCopy.blocks``.
    """

    transfer_id: int
    lost: tuple[int, ...]
    num_bytes: int
    digests: tuple[int, ...] = ()
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every block arrived as it left."""
        return not self.lost


def check_copy(copy: BlockCopy, pool: BlockStore, slots: Slots) -> None:
    """Raise ``InvariantError`` unless a copy names blocks and slots that exist, each once."""
    pool.expect_backed(copy.blocks)
    if len(copy.blocks) != len(copy.slots) or not copy.blocks:
        raise InvariantError(f"a copy of {len(copy.blocks)} blocks and {len(copy.slots)} slots")
    if len({*copy.blocks}) < len(copy.blocks) or len({*copy.slots}) < len(copy.slots):
        raise InvariantError("a block or a slot occurs twice in a copy")
    slots.check(copy.slots)


def judge_copy(
    transfer_id: int, direction: Direction, num_bytes: int, expected: np.ndarray, found: np.ndarray
) -> CopyResult:
    """Result of a copy. An outbound block is lost if its slot had no memory: ``EMPTY_DIGEST`` was found.

    An inbound block is lost if its slot was empty, or its digest is not the stored one, ``expected``.
    """
    is_outbound = direction is Direction.OUTBOUND
    is_empty = (found if is_outbound else expected) == EMPTY_DIGEST
    lost = tuple(np.flatnonzero(is_empty if is_outbound else is_empty | (expected != found)).tolist())
    problem = None
    if lost and is_outbound:
        problem = "a slot went away"
    elif lost:
        problem = "a slot holds no whole block" if is_empty.any() else f"{len(lost)} blocks have another digest"
    return CopyResult(transfer_id, lost, num_bytes, tuple(found.tolist()), problem)


@dataclass(frozen=True, slots=True)
class Pass:
    """Copies that a lane did together: (when it may be reported, result) of each, and the link's busy time."""

    results: list[tuple[float, CopyResult]]
    time: CopyTime | None


class Lane(Protocol[Job]):
    """Copies of one direction, one after another, at most ``most_jobs`` in one pass."""

    most_jobs: float

    def begin(self, transfer_id: int, copy: BlockCopy) -> Job:
        """Prepare a copy and return at once; called by the thread that submits."""

    def finish(self, jobs: Sequence[Job]) -> Pass:
        """Do these copies, or wait for their ends; called by the copy thread. An exception fails the engine."""

    def close(self) -> None:
        """Free what the lane holds. No copy is under way."""


class CopyEngine(Generic[Job]):
    """Runs copies beside compute, with a queue, a thread and a lane for each direction. One thread submits and polls.

    Copies of one direction run in order; the two directions overlap. Between ``submit`` and its result, the blocks of
    an outbound copy must not be written, and those of an inbound copy and the slots of either not be touched.
    """

    def __init__(self, store: BlockStore, slots: Slots, open_lane: Callable[[Direction], Lane[Job]]) -> None:
        self._store, self.slots = store, slots
        self._open_lane = open_lane
        self._lanes: dict[Direction, Lane[Job]] = {}
        self._jobs: dict[Direction, SimpleQueue[Job | None]] = {d: SimpleQueue() for d in Direction}
        self._ended: SimpleQueue[Pass | BaseException] = SimpleQueue()
        self._arriving: list[tuple[float, CopyResult]] = []
        self._times: list[CopyTime] = []
        self._num_in_flight = 0
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(direction,), name=f"copy-{direction.value}", daemon=True)
            for direction in Direction
        ]

    def start(self) -> Self:
        """Open the lanes and start the copy threads; returns the engine."""
        self._lanes = {direction: self._open_lane(direction) for direction in Direction}
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Finish the copies in flight, then stop the threads and close the lanes. A second call does nothing."""
        for jobs in self._jobs.values():
            jobs.put(None)
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
        """Copies whose result has not been taken yet."""
        return self._num_in_flight

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """Begin a copy and return at once; raises as ``check_copy``. An outbound copy sees what earlier steps wrote."""
        self._expect_alive()
        check_copy(copy, self._store, self.slots)
        self._jobs[copy.direction].put(self._lanes[copy.direction].begin(transfer_id, copy))
        self._num_in_flight += 1

    def poll(self) -> list[CopyResult]:
        """Take the results that are there, without waiting."""
        return self.wait(timeout_s=0)

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """Take results, waiting for the first one; empty if nothing is in flight or the time is over."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._collect(0)
        while not (results := self._take_arrived()) and self._num_in_flight and time.monotonic() < end_s:
            self._collect(min(end_s, *(ready_s for ready_s, _ in self._arriving), math.inf) - time.monotonic())
        return results

    def take_copy_times(self) -> list[CopyTime]:
        """How long the link was busy with the copies collected since the last call."""
        times, self._times = self._times, []
        return times

    # -- inside ----------------------------------------------------------------------------------------------------

    def _collect(self, timeout_s: float) -> None:
        """Collect ended copies, waiting up to ``timeout_s`` for the first; sleep so long if all are collected."""
        self._expect_alive()
        if self._num_in_flight == len(self._arriving):
            if self._arriving and timeout_s > 0:
                time.sleep(timeout_s)
            return
        with suppress(Empty):
            ended = self._ended.get(timeout=None if timeout_s == math.inf else max(0.0, timeout_s))
            while True:
                if isinstance(ended, BaseException):
                    self._failure = ended
                    break
                self._arriving += ended.results
                self._times += [] if ended.time is None else [ended.time]
                ended = self._ended.get_nowait()
        self._expect_alive()

    def _expect_alive(self) -> None:
        """Raise ``InvariantError`` if a lane raised: no copy is proven any more, so every caller must fail."""
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
        """Body of a copy thread. It continues after a lane's exception: lanes release memory as copies end."""
        lane = self._lanes[direction]
        while jobs := self._take_jobs(direction, lane.most_jobs):
            try:
                self._ended.put(lane.finish(jobs))
            except BaseException as error:
                self._ended.put(error)

    def _take_jobs(self, direction: Direction, most: float) -> list[Job]:
        """Wait for a job; return it with the jobs behind it, at most ``most``. Empty when the engine closes."""
        queue, jobs = self._jobs[direction], []
        while (job := queue.get()) is not None:
            jobs.append(job)
            if len(jobs) >= most or queue.empty():
                return jobs
        if jobs:
            queue.put(None)  # finish these first
        return jobs
