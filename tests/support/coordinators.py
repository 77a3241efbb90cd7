"""A real coordinator over a real store, served on a thread of its own."""

from __future__ import annotations

import socket
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
from floodplain.web.limits import limit_connections
from tests.support.hooked_store import HookedStore
from tests.support.server_thread import ServerThread
from tests.support.waiting import wait_until


class RunningCoordinator(ServerThread):
    """A coordinator on a thread of its own."""

    server: CoordinatorServer

    def __init__(self, store: Store, tokens: TokenRing | None, ttl_s: float, sock: socket.socket | None) -> None:
        super().__init__(sock)
        self.service = LeaseService(store, self.url, ttl_s, lease_clock)
        self.server = CoordinatorServer(LeaseWorker(self.service), tokens, self.note_ready, limit_connections(None))

    @property
    def failure(self) -> BaseException | None:
        """The bug that ended it."""
        return self.server.failure


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


def offer(name: str, num_bytes: int = 8) -> dict[str, Any]:
    """Return the first offer of a member that has just joined."""
    return {"kind": "offer", "name": name, "stamp": {"generation": 1, "revision": 1}, "offered_bytes": num_bytes}


def request(name: str, *sizes: int, number: int = 1) -> dict[str, Any]:
    """Return a request for shards of these sizes."""
    shards = [{"num_bytes": size} for size in sizes]
    return {"kind": "request", "name": name, "generation": 1, "number": number, "shards": shards}


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
