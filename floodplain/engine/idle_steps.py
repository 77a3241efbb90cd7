"""Background steps of an ``LLM``'s engine: they handle leases between two calls of ``LLM.generate``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

from floodplain.engine.compute_threads import release_compute_threads
from floodplain.engine.shell import Engine

logger = logging.getLogger(__name__)


class IdleSteps:
    """A thread that steps an engine periodically and on news of leases, while no caller drives it.

    Only one thread steps at a time: a driving caller holds the lock. Without neighbours no thread is started.

    Args:
        engine: An engine whose requests are all submitted by callers that drive it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._has_news, self._is_free = threading.Event(), threading.Event()
        self._is_ending = False
        self._failure: BaseException | None = None
        self._is_free.set()
        self._thread = threading.Thread(target=self._run, name="idle-steps", daemon=True)

    def start(self) -> None:
        """Start the thread, if the engine has neighbours."""
        if self._engine.neighbours is not None:
            self._engine.wake_by_leases(self._has_news.set)
            self._thread.start()

    @contextmanager
    def driven(self) -> Generator[None]:
        """Context in which the caller drives the engine alone.

        Raises:
            RuntimeError: A background step has failed before.
        """
        self._is_free.clear()  # or the thread might take the lock again and again
        try:
            with self._lock:
                if self._failure is not None:
                    raise RuntimeError("this LLM failed between two calls: make a new one") from self._failure
                yield
        finally:
            self._is_free.set()

    def end(self) -> None:
        """Begin no more steps. Callers that do not drive may find a last one under way."""
        self._is_ending = True
        self._has_news.set()

    def close(self) -> None:
        """End, and wait for the thread. Must not be called inside ``driven``. Safe to call twice."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._has_news.wait(self._engine.rest_s)
                self._is_free.wait()
                self._has_news.clear()
                with self._lock:
                    self._step()
        except BaseException as error:  # raised again in the next caller
            logger.critical("a step between two calls failed", exc_info=error)
            self._failure = error

    def _step(self) -> None:
        if self._is_ending or self._engine.has_unfinished:
            return
        self._engine.step()
        if self._engine.rest_s > 0:
            release_compute_threads()  # of this thread: the caller's keep spinning
