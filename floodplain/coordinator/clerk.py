"""The thread that works on the book: it does waiting jobs in one transaction, commits, and then answers them.

Jobs that arrive during a transaction are part of the next one (group commit).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from floodplain.coordinator.service import Job, LeaseService, Unavailable
from floodplain.core.errors import QueueFull, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

GONE = Unavailable("this coordinator has stopped: ask another one")
FAILED = Unavailable("this coordinator has failed, and its log says why: ask another one")
COMMIT_EVERY_S = 1e-3
"""The least time between transactions: one costs about as much as some messages in it (benchmarks/coordinator)."""
TICK_S = 0.2
CLOSING_S = 12.0
"""Longer than a reachable store needs to connect and to answer, or to fail."""
MAX_WAITING = 20_000
"""The most waiting jobs: at 2,000 a second ten seconds' work, longer than any client waits for an answer."""


class Clerk(Generic[T]):
    """Does jobs of any thread on a thread of its own, several in one transaction.

    Args:
        service: Used by the clerk's thread alone, from ``start`` on.
        announce: Called with (ticket, answer) of every job of a transaction after its commit: on that thread, or, after
            it has ended, on the submitter's.

    Attributes:
        failure: The bug, or the damaged store, that ended the thread, if one did.
    """

    def __init__(self, service: LeaseService, announce: Callable[[Sequence[tuple[T, Any]]], None]) -> None:
        self._service = service
        self._announce = announce
        self._waiting: queue.SimpleQueue[tuple[T, Job] | None] = queue.SimpleQueue()
        self._is_closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="lease-clerk", daemon=True)
        self.failure: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Return the number of jobs that have not started."""
        return self._waiting.qsize()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, ticket: T, job: Job) -> None:
        """Queue a job; its answer is announced with ``ticket``: ``Unavailable`` if the thread has ended.

        Raises:
            QueueFull: Too many jobs wait.
        """
        if self._waiting.qsize() >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} messages wait already: send fewer, or later")
        self._waiting.put((ticket, job))
        if self._has_ended:  # the thread may have missed this job; if not, the queue is empty
            self._refuse_waiting()

    def close(self) -> None:
        """Do waiting jobs, stop, and let another coordinator lead. Safe to call twice.

        If the store hangs, the thread keeps running until the process exits.
        """
        if not self._is_closing:
            self._is_closing = True
            self._waiting.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSING_S)
            if self._thread.is_alive():
                logger.warning("the store hangs, so the next coordinator waits for a while")

    def _run(self) -> None:
        try:
            next_tick_s = 0.0
            while not self._is_closing:
                if time.monotonic() >= next_tick_s:
                    self._service.tick()
                    next_tick_s = time.monotonic() + TICK_S
                self._work(self._take(next_tick_s - time.monotonic()))
            self._work(self._take(0.0))
        except UserError as error:  # a damaged store: the process ends with that line
            self.failure = error
        except BaseException as error:
            logger.exception("the lease book failed")
            self.failure = error
        finally:
            self._has_ended = True
            self._refuse_waiting()
            self._service.resign()

    def _work(self, taken: list[tuple[T, Job]]) -> None:
        while taken:
            began_s = time.monotonic()
            try:
                answers = self._service.serve([job for _, job in taken])
            except BaseException:
                self._announce([(ticket, FAILED) for ticket, _ in taken])
                raise
            done, taken = taken[: len(answers)], taken[len(answers) :]
            self._announce([(ticket, answer) for (ticket, _), answer in zip(done, answers, strict=True)])
            if (left_s := began_s + COMMIT_EVERY_S - time.monotonic()) > 0:
                time.sleep(left_s)

    def _refuse_waiting(self) -> None:
        with suppress(queue.Empty):
            while True:
                waiting = self._waiting.get_nowait()
                if waiting is not None:
                    self._announce([(waiting[0], GONE if self.failure is None else FAILED)])

    def _take(self, timeout_s: float) -> list[tuple[T, Job]]:
        """Return all waiting jobs; if there are none, those that arrive within the timeout."""
        taken: list[tuple[T, Job]] = []
        try:
            first = self._waiting.get(timeout=max(timeout_s, 0.0))
            while first is not None:
                taken.append(first)
                first = self._waiting.get_nowait()
        except queue.Empty:
            pass
        return taken
