"""The thread that works on the lease book, and the event loop's way to it.

The thread does all waiting jobs in one transaction, commits, and then answers them (group commit).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from floodplain.coordinator.news import NewsBoard
from floodplain.coordinator.service import Job, LeaseService, Unavailable
from floodplain.core.errors import QueueFull, UserError
from floodplain.leases.states import Lease
from floodplain.lending.wire import News
from floodplain.web.errors import ApiError

logger = logging.getLogger(__name__)

LEADER_HEADER = "Floodplain-Leader"
"""The response header in which a coordinator that stands by names the leader."""
GONE = Unavailable("this coordinator has stopped: ask another one")
FAILED = Unavailable("this coordinator has failed, and its log says why: ask another one")
NOT_LEADING = "this coordinator does not lead"
COMMIT_EVERY_S = 3e-3
"""The least time between transactions: one costs as much as ten messages in it (benchmarks/coordinator)."""
TICK_S = 0.2
CLOSING_S = 12.0
"""Longer than a reachable store needs to connect and to answer, or to fail."""
MAX_WAITING = 20_000
"""The most waiting jobs: at 2,000 a second ten seconds' work, longer than any client waits for an answer."""

_Asked = tuple["asyncio.Future[Any]", Job]
_Answered = tuple["asyncio.Future[Any]", Any]


class NotLeading(ApiError):
    """503: ask another coordinator, or this one later."""

    def __init__(self, answer: Unavailable) -> None:
        where = f" ({answer.leader_url})" if answer.leader_url else ""
        super().__init__(503, f"{answer.reason}{where}", code="unavailable")
        self.headers = {LEADER_HEADER: answer.leader_url} if answer.leader_url else None


class LeaseWorker:
    """Does the jobs of an event loop on a thread of its own, which alone uses the service's book and store.

    All is called on ``open``'s loop. ``failure``: the bug, or the damaged store, that ended the thread, if one did.
    """

    def __init__(self, service: LeaseService) -> None:
        self.service = service
        self.news = NewsBoard()
        self.failure: BaseException | None = None
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._changed: list[Lease] = []  # since the last ``_announce``
        self._is_closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="lease-worker", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_waiting(self) -> int:
        """Return the number of jobs that have not started."""
        return self._waiting.qsize()

    def open(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self.service.on_change = self._note_change
        self._thread.start()

    async def close(self) -> None:
        """Do waiting jobs, stop, and let another coordinator lead. Safe to call twice.

        If the store hangs, the thread keeps running until the process exits.
        """
        if not self._is_closing:
            self._is_closing = True
            self._waiting.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, CLOSING_S)
            if self._thread.is_alive():
                logger.warning("the store hangs, so the next coordinator waits for a while")

    async def ask(self, job: Job) -> Any:
        """Return the answer to a job, after its changes are committed.

        ApiError 503 if this coordinator does not lead, or its store does not answer; QueueFull if too many jobs wait.
        """
        if self._waiting.qsize() >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} messages wait already: send fewer, or later")
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put((answered, job))
        if self._has_ended:  # the thread may have missed this job; if not, the queue is empty
            self._refuse_waiting()
        answer = await answered
        if isinstance(answer, Unavailable):
            raise NotLeading(answer)
        return answer

    async def wait_for_news(self, name: str, mark: str, wait_s: float) -> News:
        """As ``NewsBoard.wait``; ApiError (503) also if this coordinator does not lead."""
        if not self.service.is_leading:
            raise NotLeading(Unavailable(NOT_LEADING, self.service.leader_url))
        return await self.news.wait(name, mark, wait_s)

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_tick_s = 0.0
            while not self._is_closing:
                if time.monotonic() >= next_tick_s:
                    self.service.tick()
                    if self._changed:
                        self._announce([])
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
            self.service.resign()

    def _work(self, taken: list[_Asked]) -> None:
        while taken:
            began_s = time.monotonic()
            try:
                answers = self.service.serve([job for _, job in taken])
            except BaseException:
                self._announce([(answered, FAILED) for answered, _ in taken])
                raise
            done, taken = taken[: len(answers)], taken[len(answers) :]
            self._announce([(answered, answer) for (answered, _), answer in zip(done, answers, strict=True)])
            if (left_s := began_s + COMMIT_EVERY_S - time.monotonic()) > 0:
                time.sleep(left_s)

    def _take(self, timeout_s: float) -> list[_Asked]:
        """Return all waiting jobs; if there are none, those that arrive within the timeout."""
        taken: list[_Asked] = []
        with suppress(queue.Empty):
            first = self._waiting.get(timeout=max(timeout_s, 0.0))
            while first is not None:
                taken.append(first)
                first = self._waiting.get_nowait()
        return taken

    def _refuse_waiting(self) -> None:
        with suppress(queue.Empty):
            while True:
                waiting = self._waiting.get_nowait()
                if waiting is not None:
                    self._announce([(waiting[0], GONE if self.failure is None else FAILED)])

    def _note_change(self, leases: Sequence[Lease] | None) -> None:
        if leases is None:
            self._call_on_loop(self.news.refuse, f"{NOT_LEADING} any more")
        else:
            self._changed += leases

    def _announce(self, answers: Sequence[_Answered]) -> None:
        """Pass answers and committed leases to the event loop: one wake-up, which costs as much as an answer."""
        changed, self._changed = self._changed, []
        self._call_on_loop(self._tell, changed, answers)

    def _call_on_loop(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop has ended, as if a store hangs: no request waits
            self._loop.call_soon_threadsafe(callback, *args)

    def _tell(self, changed: Sequence[Lease], answers: Sequence[_Answered]) -> None:
        if changed:
            self.news.post(changed)
        for answered, answer in answers:
            if not answered.done():  # the client may have disconnected
                answered.set_result(answer)
