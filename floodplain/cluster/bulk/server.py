"""Serves stores (KV blocks, parameters) to other instances, which pull chunks; each connection has a thread."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from floodplain.cluster.bulk.wire import (
    HELLO_BYTES,
    MAX_CHUNK_BYTES,
    YES,
    BulkChunk,
    BulkRefusal,
    BulkRequest,
    compute_digest,
    pack_answer,
    pack_hello,
    read_request,
)
from floodplain.cluster.wire.frames import FrameSocket
from floodplain.cluster.wire.stage_link import HELLO_TIMEOUT_S
from floodplain.core.errors import InvariantError, PeerLost
from floodplain.web.address import host_port


class NotServed(LookupError):
    """A store does not have what was requested, or no store has this name (any more)."""


class Store(Protocol):
    """Memory that peers read. ``read`` is called on several threads at once."""

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes of some indices of a part, index after index: uint8, of any shape.

        ``part`` and ``indices``, int64 [num_indices], come from a peer: 0 or more, and not checked further. Raises
        ``NotServed``, or another ``LookupError``, if the store does not have all of them.
        """


class BulkGate:
    """Open while no holder is in ``busy``. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_busy = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Hold the gate shut; several holders may overlap."""
        with self._changed:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_busy -= 1
                if not self._num_busy:
                    self._changed.notify_all()

    def wait(self, max_s: float | None = None) -> bool:
        """Wait until the gate is open, at most ``max_s`` seconds. True if it is open."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_busy, max_s)


class ServedStore:
    """A store while it is served: from ``serve`` to ``withdraw``. One index has at most ``index_bytes`` bytes."""

    def __init__(self, name: str, store: Store, index_bytes: int) -> None:
        self.name, self.index_bytes = name, index_bytes
        self._store, self._reads = store, BulkGate()
        self._is_withdrawn = False

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes of some indices: uint8 [num_bytes], valid after ``end``. ``NotServed`` if it does not have all."""
        with self._reads.busy():  # before the look at ``_is_withdrawn``: ``end`` sets it, then waits for reads
            if self._is_withdrawn:
                raise NotServed(f"store {self.name!r} was withdrawn")
            try:
                data = self._store.read(part, indices)
            except LookupError as error:
                raise NotServed(str(error) or f"store {self.name!r} refused the indices") from None
            if data.dtype != np.uint8 or data.nbytes > self.index_bytes * len(indices):
                raise InvariantError(f"store {self.name!r} gave {data.nbytes} bytes of {data.dtype}")
            # an array over memory that is not its own may be unmapped once the read has ended
            return data.reshape(-1) if data.flags.owndata else data.reshape(-1).copy()

    def end(self) -> None:
        """Refuse further reads, and return when none is under way."""
        self._is_withdrawn = True
        self._reads.wait()


logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 2**10
STALL_S = 30.0
"""A connection on which a client neither reads nor sends a request for so long is closed."""
MAX_PEERS = 16
"""Most connections that have shown a secret (more are refused), and most that have not (the oldest is closed)."""
_ACCEPT_RETRY_S = 0.1


class BulkServer:
    """Serves stores to clients that show an admitted secret. Every method may be called on any thread.

    Args:
        listener: Bound (``floodplain.web.address.bind``); owned from now on.
        gate: Called before each chunk. It returns when the chunk may be sent, within less than a client's timeout.
        chunk_bytes: About the size of a chunk; one index is never split.
        stall_s: Seconds, as ``STALL_S``.
    """

    def __init__(
        self,
        listener: socket.socket,
        gate: Callable[[], object],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise InvariantError(f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes, not {chunk_bytes}")
        self.address = host_port(*listener.getsockname()[:2])
        self._listener, self._gate = listener, gate
        self._chunk_bytes, self._stall_s = chunk_bytes, stall_s
        self._stores: dict[str, ServedStore] = {}
        self._hellos: set[bytes] = set()
        self._hello_of: dict[socket.socket, bytes | None] = {}  # connections; None until the hello is read
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Listen, and start to accept connections."""
        self._listener.listen()
        self._begin(threading.Thread(target=self._accept, name="floodplain-bulk-accept", daemon=True))

    def close(self) -> None:
        """Close every connection, and return when no store is read. Safe to call twice."""
        with self._lock:
            self._closed.set()
            for sock in (self._listener, *self._hello_of):
                _shut(sock)
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._listener.close()

    def admit(self, secret: bytes) -> None:
        """Admit clients that show this secret."""
        with self._lock:
            self._hellos.add(pack_hello(secret))

    def revoke(self, secret: bytes) -> None:
        """Refuse a secret from now on, and close the connections that it opened."""
        hello = pack_hello(secret)
        with self._lock:
            self._hellos.discard(hello)
            for sock, shown in self._hello_of.items():
                if shown == hello:
                    _shut(sock)

    def serve(self, name: str, store: Store, index_bytes: int) -> None:
        """Let clients read a store under a new name; its indices have at most ``index_bytes`` bytes."""
        if not 0 < index_bytes <= MAX_CHUNK_BYTES:
            raise InvariantError(f"an index has 1 to {MAX_CHUNK_BYTES} bytes, not {index_bytes}")
        with self._lock:
            if name in self._stores:
                raise InvariantError(f"store {name!r} is served already")
            self._stores[name] = ServedStore(name, store, index_bytes)

    def withdraw(self, name: str) -> None:
        """End a store. Waits for its reads under way, never for a client; then its memory may be unmapped."""
        with self._lock:
            served = self._stores.pop(name, None)
        if served is not None:
            served.end()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # closed, aborted by the client, or too many open files
                if not self._closed.wait(_ACCEPT_RETRY_S):
                    logger.warning("a connection for bulk data could not be accepted (%s)", error)
                continue
            with self._lock:
                if self._closed.is_set():
                    sock.close()
                    return
                self._make_way()
                self._hello_of[sock] = None
            try:
                self._begin(threading.Thread(target=self._talk, args=(sock,), name="floodplain-bulk", daemon=True))
            except RuntimeError as error:  # the system has no thread now
                logger.warning("a connection for bulk data could not be served (%s)", error)
                with self._lock:
                    self._hello_of.pop(sock)
                sock.close()

    def _begin(self, thread: threading.Thread) -> None:
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _talk(self, sock: socket.socket) -> None:
        try:
            if self._is_admitted(sock, _read_hello(sock)):
                sock.settimeout(self._stall_s)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # bytes in the send buffer have passed the gate already: keep it short
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * self._chunk_bytes)
                sock.sendall(YES)
                self._answer(FrameSocket(sock, max_data_bytes=0))
        except (OSError, PeerLost) as error:
            logger.debug("a connection for bulk data ended (%s)", error)
        finally:
            with self._lock:
                self._hello_of.pop(sock, None)
                self._threads.discard(threading.current_thread())
            sock.close()

    def _is_admitted(self, sock: socket.socket, shown: bytes) -> bool:
        with self._lock:
            matches = [hello for hello in self._hellos if hmac.compare_digest(hello, shown)]
            if not matches or self._count_connections(is_known=True) >= MAX_PEERS:
                return False
            self._hello_of[sock] = matches[0]
            return True

    def _make_way(self) -> None:
        """Close the oldest connection without a secret if there are ``MAX_PEERS`` of them."""
        if self._count_connections(is_known=False) >= MAX_PEERS:
            oldest = next(sock for sock, hello in self._hello_of.items() if hello is None)
            del self._hello_of[oldest]
            _shut(oldest)  # its thread closes it

    def _count_connections(self, *, is_known: bool) -> int:
        return sum((hello is not None) == is_known for hello in self._hello_of.values())

    def _answer(self, frames: FrameSocket) -> None:
        while True:
            request = read_request(frames.read())
            try:
                for chunk in self._read(request):
                    frames.send(pack_answer(chunk))
            except NotServed as error:
                frames.send(pack_answer(BulkRefusal(request.number, str(error))))

    def _read(self, request: BulkRequest) -> Iterator[BulkChunk]:
        with self._lock:
            served, indices = self._stores.get(request.store), request.indices
        if served is None:
            raise NotServed(f"no store {request.store!r} is served")
        step = max(1, self._chunk_bytes // served.index_bytes)
        for start in range(0, len(indices), step):
            self._gate()
            piece: np.ndarray = indices[start : start + step]
            data = served.read(request.part, piece)
            yield BulkChunk(request.number, start, len(piece), compute_digest(data), data)


def _read_hello(sock: socket.socket) -> bytes:
    """The first bytes of a client; fewer if it disconnects. ``OSError`` if they are late by ``HELLO_TIMEOUT_S``."""
    deadline, shown = time.monotonic() + HELLO_TIMEOUT_S, b""
    while len(shown) < HELLO_BYTES:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = sock.recv(HELLO_BYTES - len(shown))
        if not more:
            break
        shown += more
    return shown


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has disconnected
        sock.shutdown(socket.SHUT_RDWR)
