"""A real coordinator over a real store, served on a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from floodplain.coordinator.run import CoordinatorServer
from floodplain.coordinator.service import LeaseService
from floodplain.coordinator.store import Store
from floodplain.coordinator.tokens import TokenRing
from floodplain.coordinator.worker import LeaseWorker
from floodplain.lending.membership import lease_clock
from floodplain.web.address import bind, url_of
from floodplain.web.limits import limit_connections
from tests.support.hooked_store import HookedStore
from tests.support.waiting import HANG_S, wait_until


class RunningCoordinator:
    """``url`` is its address; ``stop`` has the effect of a signal."""

    def __init__(self, store: Store, tokens: TokenRing | None, ttl_s: float, sock: socket.socket | None) -> None:
        self._sock = bind("127.0.0.1", 0) if sock is None else sock
        self._sock.listen()
        self.url = url_of(self._sock)
        self.service = LeaseService(store, self.url, ttl_s, lease_clock)
        self._is_ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = CoordinatorServer(LeaseWorker(self.service), tokens, self._note_ready, limit_connections(None))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._sock]})

    @property
    def failure(self) -> BaseException | None:
        """The bug that ended it."""
        return self._server.failure

    def _note_ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_ready.set()

    def start(self) -> None:
        self._thread.start()
        assert self._is_ready.wait(HANG_S)

    def stop(self) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._server.stop)

    def join(self) -> None:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()


@contextmanager
def coordinating(
    store: Store,
    *,
    tokens: TokenRing | None = None,
    ttl_s: float = 10.0,
    leads: bool = True,
    sock: socket.socket | None = None,
) -> Iterator[RunningCoordinator]:
    """Yield a running coordinator, once it leads if ``leads``; at the end it is stopped and its store is closed.

    It listens at ``sock``, which is bound; None: at any port.
    """
    running = RunningCoordinator(store, tokens, ttl_s, sock)
    with closing(store):
        running.start()
        try:
            if leads:
                wait_until(lambda: running.service.is_leading)
            yield running
        finally:
            running.stop()
            running.join()


def open_store(folder: Path) -> HookedStore:
    """Open a store in a file of the folder."""
    return HookedStore.open(f"sqlite:///{folder / 'leases.db'}")


def join(name: str, instance: str = "i1") -> dict[str, Any]:
    """Return a join message."""
    return {"kind": "join", "name": name, "instance": instance}


def say(coordinator: RunningCoordinator, *messages: dict[str, Any], token: str = "") -> httpx.Response:
    """Send a batch; return the response."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.post(f"{coordinator.url}/v1/messages", json={"messages": list(messages)}, headers=headers)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response; it has our usual shape, and one line."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000
    return dict(error)
