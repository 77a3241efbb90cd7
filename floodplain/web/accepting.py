"""Accepts connections a few at a time; closes the longest waiting one if room or open files run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 8
"""Most connections that are accepted before other work of the event loop runs."""

RETRY_S = 0.1
"""Seconds for which accepting pauses if there is no room, or no file is left."""

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
"""Temporary errors: the system has no file, process or memory now."""

LOG_EVERY_S = 1.0
"""Least seconds between two log lines about accepting."""

LISTEN_BACKLOG = 4096
"""Connections that the kernel queues until they are accepted; ``net.core.somaxconn`` may lower this."""

C = TypeVar("C")


class Accepting(ABC, Generic[C]):
    """Accepts connections of a listening socket, on the event loop. ``if_full`` and ``if_scarce`` are its log lines."""

    def __init__(
        self, sock: socket.socket, *, if_full: str, if_scarce: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sock = sock
        self._if_full, self._if_scarce = if_full, if_scarce
        self._clock = clock
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Start accepting."""
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Stop accepting. Does not close the socket."""
        assert self._loop is not None
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether one more connection may be open."""

    @abstractmethod
    def take(self, accepted: socket.socket) -> None:
        """Serve an accepted connection, which the callee owns."""

    @abstractmethod
    def find_victim(self) -> C | None:
        """The longest waiting connection that may be closed; None if there is none."""

    @abstractmethod
    def evict(self, victim: C) -> None:
        """Close a connection to make room."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            has_room = self.has_room
            victim = None if has_room else self.find_victim()
            if victim is None and not has_room:
                self._pause(self._if_full)
                return
            try:
                accepted, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._evict(victim or self.find_victim())
                self._pause(f"cannot accept a connection ({error.strerror or error}): {self._if_scarce}")
                return
            self._evict(victim)
            self.take(accepted)

    def _evict(self, victim: C | None) -> None:
        if victim is not None:
            self.evict(victim)

    def _pause(self, reason: str) -> None:
        assert self._loop is not None
        if self._clock() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._clock()
            logger.warning("%s", reason)
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(RETRY_S, self.open)
