"""The engine behind all copies: a queue and a thread for each direction, and a lane that moves its bytes.

A *lane* copies in one direction. Its ``begin`` runs on the thread that submits; its ``finish``, which takes time, runs
on the copy thread of its direction.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, Self, TypeVar

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.swap_slots import Slots
from floodplain.memory.transfer import BlockCopy, BlockStore, CopyResult, check_copy

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
"""A lane's own record of a copy that has begun."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Copies that a lane did together.

    Attributes:
        results: (time, result) of each copy; the result may be reported from then on, by the monotonic clock.
        time: How long the link was busy; None if nothing went over it.
    """

    results: list[tuple[float, CopyResult]]
    time: CopyTime | None


class Lane(Protocol[Job]):
    """Copies of one direction, one after another.

    Attributes:
        most_jobs: Copies in one pass, at most.
    """

    most_jobs: float

    def begin(self, transfer_id: int, copy: BlockCopy) -> Job:
        """Prepare a copy and return at once; called by the thread that submits."""

    def finish(self, jobs: Sequence[Job]) -> Pass:
        """Do these copies, or wait for their ends; called by the copy thread. An exception fails the engine."""

    def close(self) -> None:
        """Free what the lane holds. No copy is under way."""


class CopyEngine(Generic[Job]):
    """A ``TransferEngine`` with a queue, a thread and a lane for each direction.

    Args:
        store: The blocks that are copied.
        slots: The slots that they are copied to and from.
        open_lane: Makes the lane of a direction.
    """

    def __init__(self, store: BlockStore, slots: Slots, open_lane: Callable[[Direction], Lane[Job]]) -> None:
        self._store, self._slots = store, slots
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
        """Check a copy, begin it and return at once."""
        self._expect_alive()
        check_copy(copy, self._store, self._slots)
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
        """Raise if a copy thread has failed: no copy is proven any more, so every caller must fail.

        Raises:
            InvariantError: A lane raised; its exception is the cause.
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
        """Body of a copy thread. A lane's exception is raised to the caller of the engine, and ends the process there.

        The thread continues after that: lanes release memory as copies end, and a thread that must return that memory
        must not wait for ever.
        """
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
