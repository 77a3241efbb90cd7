"""The thread that works on the book: takes what has come, has it done and committed in one transaction, then answers.

Whatever comes while a transaction is under way goes into the next one (group commit).
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
"""Transactions begin no closer together: each costs about as much as some messages in it (benchmarks/coordinator)."""
TICK_S = 0.2
CLOSING_S = 12.0
"""Longer than a store that is there needs to connect and to answer, or to say that it cannot."""
MAX_WAITING = 20_000
"""Jobs that may wait; at 2,000 a second these are ten seconds' work, longer than anybody waits for an answer."""


class Clerk(Generic[T]):
    """See the module. Any thread may submit.

    Args:
        service: Used by the clerk's thread alone, from ``start`` on.
        announce: Called with (ticket, answer) of every job of a transaction once it is committed: on that thread, or,
            when that has ended, on the submitter's.

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
        """Jobs that nobody has begun."""
        return self._waiting.qsize()

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, ticket: T, job: Job) -> None:
        """Have a job done; its answer is announced with ``ticket``: ``Unavailable`` if the thread has ended.

        Raises:
            QueueFull: Too many wait.
        """
        if self._waiting.qsize() >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} messages wait already: send fewer, or later")
        self._waiting.put((ticket, job))
        if self._has_ended:  # after the last look of the thread at what waits, or before: then it finds nothing here
            self._refuse_waiting()

    def close(self) -> None:
        """Do what waits, stop, and let another coordinator lead. Safe to call twice.

        If the store hangs, the thread is left behind: it ends with the process.
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
        except UserError as error:  # the store's fault: the process ends with that line
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
        """Everything that waits; if nothing does, what comes first within the time."""
        taken: list[tuple[T, Job]] = []
        try:
            first = self._waiting.get(timeout=max(timeout_s, 0.0))
            while first is not None:
                taken.append(first)
                first = self._waiting.get_nowait()
        except queue.Empty:
            pass
        return taken
