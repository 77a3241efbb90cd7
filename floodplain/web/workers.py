"""Threads for work that would block an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class Workers:
    """A bounded number of threads that run jobs in order.

    They start with the first job and end with the process, which does not wait for them: a job may be long.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_started = False

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """The result of ``work(*arguments)``, or its exception.

        A cancelled call returns at once: a job that has not begun is dropped; the result of a running job is ignored.
        """
        self._start()
        result: Future[T] = Future()
        self._jobs.put((result, lambda: work(*arguments)))
        return await asyncio.wrap_future(result)

    def _start(self) -> None:
        with self._lock:
            if not self._is_started:
                for number in range(self._num_threads):
                    threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()
                self._is_started = True  # not if no thread could be started: the next call tries again

    def _work(self) -> None:
        while True:
            result, work = self._jobs.get()
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except BaseException as error:  # raised where the result is awaited, such as a panic of Rust code
                    result.set_exception(error)
            del result, work  # waiting for the next job must not keep them alive
