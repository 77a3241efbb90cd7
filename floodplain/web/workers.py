"""Threads for work that would block an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Workers:
    """A bounded number of threads that run jobs in order.

    They start with the first job and end with the process, which does not wait for them: a job may be long.

    Args:
        num_threads: Number of threads.
        name: Prefix of the threads' names.
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
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, result, lambda: work(*arguments)))
        return await result

    def _start(self) -> None:
        with self._lock:
            if not self._is_started:
                self._is_started = True
                for number in range(self._num_threads):
                    threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            loop, result, work = self._jobs.get()
            if result.cancelled():
                continue
            settle: Callable[[], None]
            try:
                settle = _Settle(result, work(), None)
            except Exception as error:  # the job's exception is raised where its result is awaited
                settle = _Settle(result, None, error)
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the event loop is closed: nothing awaits the result
                continue
            finally:
                del loop, result, work, settle


class _Settle:
    """Gives a future its result, on its event loop."""

    def __init__(self, future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
        self._future = future
        self._value = value
        self._error = error

    def __call__(self) -> None:
        if self._future.cancelled():
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._value)
