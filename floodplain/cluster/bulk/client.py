"""Pulls KV blocks and parameters from another instance's ``BulkServer``, and verifies each chunk before it is used."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from floodplain.cluster.bulk.wire import (
    MAX_CHUNK_BYTES,
    MAX_REQUEST_INDICES,
    YES,
    BulkChunk,
    BulkRefusal,
    BulkRequest,
    compute_digest,
    pack_hello,
    pack_request,
    read_answer,
)
from floodplain.cluster.settings import split_address
from floodplain.cluster.wire.frames import FrameSocket
from floodplain.core.errors import PeerLost, UserError

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""A peer that sends nothing for so long is declared lost."""
MAX_AHEAD_REQUESTS = 16
MAX_AHEAD_INDICES = 2 * MAX_REQUEST_INDICES
"""Most indices of requests under way. They fit the socket buffers: sending them never blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class BulkItem:
    """Indices, int64 [num_indices], of part ``part`` (a layer) of a store: they are fetched all, or count as not."""

    store: str
    part: int
    indices: npt.NDArray[np.int64]


Sink = Callable[[BulkItem, npt.NDArray[np.int64], npt.NDArray[np.uint8]], None]
"""Writes (item, indices of a chunk [num], their bytes [num_bytes], index after index); it may keep both arrays."""


class BulkClient:
    """One connection to a peer. ``close`` may be called on any thread. ``timeout_s`` bounds connecting, too."""

    def __init__(self, address: str, secret: bytes, timeout_s: float = TIMEOUT_S) -> None:
        self._address, self._hello, self._timeout_s = address, pack_hello(secret), timeout_s
        self._sock: socket.socket | None = None
        self._frames: FrameSocket | None = None
        self._num_asked = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Connect. Raises ``PeerLost`` if the peer cannot be reached, refuses the secret, or ``close`` was called."""
        try:
            host, port = split_address(self._address, "the address of a peer")
            family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = self._keep(socket.socket(family, kind, proto))
            sock.connect(address)
            sock.sendall(self._hello)
            answer = sock.recv(1)
        except (OSError, UserError) as error:
            self.close()
            raise PeerLost(f"no bulk data from {self._address} ({error})") from None
        if answer != YES:
            self.close()
            raise PeerLost(f"no bulk data from {self._address}: it does not take the secret, or has too many clients")
        self._frames = FrameSocket(sock, MAX_CHUNK_BYTES)

    def fetch(self, items: Sequence[BulkItem], sink: Sink) -> list[bool]:
        """Whether each item arrived whole; each chunk is verified before the sink gets it.

        The sink may have got some chunks of an item that did not. If the sink raises, or ``PeerLost`` is raised (the
        connection ended, or the peer was silent or sent nonsense), the connection cannot be used again.
        """
        if self._frames is None:
            raise PeerLost(f"no bulk data from {self._address}: not connected")
        fetch = _Fetch(self._frames, items, sink, self._num_asked)
        fetch.run()
        self._num_asked = fetch.num_asked
        return fetch.are_whole

    def close(self) -> None:
        """Close the connection: a blocked ``start`` or ``fetch`` fails at once. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # not connected yet, or the peer has disconnected
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _keep(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sock = sock
            if self._is_closed:
                sock.close()  # so that ``connect`` fails
        return sock


@dataclass(slots=True, eq=False)
class _Pull:
    """One request for indices of the item at position ``item``; ``number`` is -1 until it is sent."""

    item: int
    indices: npt.NDArray[np.int64]
    number: int = -1
    num_taken: int = 0


class _Fetch:
    """One call of ``fetch``. Each item counts as whole until a failure is known."""

    def __init__(self, frames: FrameSocket, items: Sequence[BulkItem], sink: Sink, num_asked: int) -> None:
        self.are_whole, self.num_asked = [True] * len(items), num_asked
        self._frames, self._items, self._sink = frames, items, sink
        self._waiting = deque(
            _Pull(number, item.indices[start : start + MAX_REQUEST_INDICES])
            for number, item in enumerate(items)
            for start in range(0, len(item.indices), MAX_REQUEST_INDICES)
        )
        self._under_way: deque[_Pull] = deque()
        self._num_ahead = 0  # indices of requests under way

    def run(self) -> None:
        while self._waiting or self._under_way:
            while self._waiting and self._has_room_for(self._waiting[0]):
                self._ask(self._waiting.popleft())
            if self._under_way:
                self._take(self._under_way[0])

    def _has_room_for(self, pull: _Pull) -> bool:
        is_short = self._num_ahead + len(pull.indices) <= MAX_AHEAD_INDICES
        return is_short and len(self._under_way) < MAX_AHEAD_REQUESTS

    def _ask(self, pull: _Pull) -> None:
        if not self.are_whole[pull.item]:
            return
        item, pull.number = self._items[pull.item], self.num_asked
        self._frames.send(pack_request(BulkRequest(pull.number, item.store, item.part, pull.indices)))
        self.num_asked += 1
        self._num_ahead += len(pull.indices)
        self._under_way.append(pull)

    def _take(self, pull: _Pull) -> None:
        answer = read_answer(self._frames.read())
        if answer.number != pull.number:
            raise PeerLost("a peer answered another request than the next one")
        if isinstance(answer, BulkRefusal):
            self._fail(pull, "missing", answer.why)
            self._end(pull)
            return
        self._take_chunk(pull, answer)
        if pull.num_taken == len(pull.indices):
            self._end(pull)

    def _take_chunk(self, pull: _Pull, chunk: BulkChunk) -> None:
        end = pull.num_taken + chunk.count
        if chunk.start != pull.num_taken or not chunk.count or end > len(pull.indices):
            raise PeerLost("a peer sent another chunk than the next one")
        indices, pull.num_taken = pull.indices[chunk.start : end], end
        if compute_digest(chunk.data) != chunk.digest:
            self._fail(pull, "damaged", f"indices {indices[0]} to {indices[-1]} do not match their digest")
        elif self.are_whole[pull.item]:
            self._sink(self._items[pull.item], indices, chunk.data)

    def _fail(self, pull: _Pull, what: str, why: str) -> None:
        if self.are_whole[pull.item]:
            self.are_whole[pull.item] = False
            item = self._items[pull.item]
            logger.warning("part %d of %r is %s: %s", item.part, item.store, what, why)

    def _end(self, pull: _Pull) -> None:
        self._under_way.popleft()
        self._num_ahead -= len(pull.indices)
