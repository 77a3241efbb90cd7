"""Admission of instances: checks the token in the first frame of a connection."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping

from floodplain.cluster.settings import MAX_UNADMITTED
from floodplain.cluster.wire.frames import MAX_HELLO_BYTES, FrameLink
from floodplain.cluster.wire.messages import Hello, read_instance_message
from floodplain.core.codec import WireError
from floodplain.web.accepting import LISTEN_BACKLOG, RETRY_S, Accepting

HELLO_TIMEOUT_S = 5.0
LEAST_STAY_S = RETRY_S
"""Least age of a connection without a token that may be closed for a new one: a true hello has arrived by then."""


class Door(Accepting[asyncio.Task[None]]):
    """Accepts connections on a bound socket, and reads their hellos.

    ``tokens``: secrets that admit an instance, each with its slot; None: an instance that was started elsewhere.
    ``welcome``: called with each connection. It reads the hello first, and owns the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        tokens: Mapping[str, int | None],
        welcome: Callable[[FrameLink], Awaitable[None]],
    ) -> None:
        if_full = f"{MAX_UNADMITTED} connections to the address where instances join have shown no token"
        super().__init__(sock, if_full=if_full, if_scarce="raise ulimit -n")
        self._tokens = dict(tokens)
        self._welcome = welcome
        self._unadmitted: dict[asyncio.Task[None], float] = {}  # when each was accepted, oldest first
        self._known: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Start to accept connections."""
        self._sock.listen(LISTEN_BACKLOG)
        super().open()

    async def read_hello(self, link: FrameLink) -> Hello | None:
        """The ``Hello`` of this task's connection; None if late or missing. WireError if another message comes."""
        frame = await link.read(MAX_HELLO_BYTES, HELLO_TIMEOUT_S)
        if frame is None:
            return None
        hello = read_instance_message(frame[0])
        if not isinstance(hello, Hello):
            raise WireError("it did not say who it is")
        return hello

    def find_slots(self, shown: str) -> list[int | None]:
        """The slot of a token, as the only item; empty if no instance is admitted with this token."""
        found = [slot for token, slot in self._tokens.items() if _is_equal(token, shown)]
        task = asyncio.current_task()
        if found and task is not None and self._unadmitted.pop(task, None) is not None:
            self._known.add(task)
        return found

    @property
    def has_room(self) -> bool:
        """Whether fewer than ``MAX_UNADMITTED`` open connections have shown no token."""
        return len(self._unadmitted) < MAX_UNADMITTED

    def take(self, accepted: socket.socket) -> None:
        """Serve an accepted connection in a new task."""
        unserved = [accepted]
        task = asyncio.get_running_loop().create_task(self._serve(unserved))
        self._unadmitted[task] = self._clock()
        task.add_done_callback(self._forget)
        task.add_done_callback(lambda _: _close(unserved))  # it was cancelled before its first step

    def find_victim(self) -> asyncio.Task[None] | None:
        """The oldest connection without a token, if it is at least ``LEAST_STAY_S`` old; else None."""
        task = next(iter(self._unadmitted), None)
        return None if task is None or self._clock() - self._unadmitted[task] < LEAST_STAY_S else task

    def evict(self, victim: asyncio.Task[None]) -> None:
        """Cancel the task of a connection, which closes it."""
        del self._unadmitted[victim]
        self._known.add(victim)
        victim.cancel()

    async def shut(self) -> None:
        """Stop accepting, and close all connections."""
        self.close()
        tasks = [*self._unadmitted, *self._known]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, unserved: list[socket.socket]) -> None:
        """Serve a connection. Not by ``asyncio.start_server``, which logs tracebacks if no file descriptor is left."""
        loop, accepted = asyncio.get_running_loop(), unserved.pop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted)
        await self._welcome(FrameLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop)))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unadmitted.pop(task, None)
        self._known.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the router keeps exceptions that are bugs


def _close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def _is_equal(secret: str, shown: str) -> bool:
    return hmac.compare_digest(secret.encode(), shown.encode(errors="replace"))
