"""Bulk transfers inside one process: a server with stores in memory, and a relay that damages, cuts or withholds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from floodplain.cluster.bulk.client import TIMEOUT_S, BulkClient, BulkItem
from floodplain.cluster.bulk.server import STALL_S, BulkServer
from floodplain.cluster.bulk.wire import HELLO_BYTES, MAX_CHUNK_BYTES, compute_digest
from floodplain.cluster.settings import split_address
from floodplain.cluster.wire.frames import Frame, FrameSocket
from floodplain.core.errors import PeerLost
from floodplain.web.address import bind
from tests.support.waiting import HANG_S

SECRET = bytes(range(32))
CHUNK_BYTES = 64
LOCAL = "127.0.0.1"


class FlatStore:
    """Each part is a run of bytes, cut into pieces of ``index_bytes``; the last piece may be shorter."""

    def __init__(self, parts: list[npt.NDArray[np.uint8]], index_bytes: int) -> None:
        self.parts, self.index_bytes = parts, index_bytes

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        pieces = -(-len(self.parts[part]) // self.index_bytes)
        if indices.max() >= pieces:
            raise IndexError(f"part {part} has {pieces} pieces")
        return np.concatenate([self.piece(part, int(index)) for index in indices])

    def piece(self, part: int, index: int) -> npt.NDArray[np.uint8]:
        return self.parts[part][index * self.index_bytes : (index + 1) * self.index_bytes]


class BlockingStore(FlatStore):
    """A store whose reads set ``began`` and block until ``may_end`` is set."""

    def __init__(self, parts: list[npt.NDArray[np.uint8]], index_bytes: int) -> None:
        super().__init__(parts, index_bytes)
        self.began, self.may_end = threading.Event(), threading.Event()

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        self.began.set()
        assert self.may_end.wait(HANG_S)
        return super().read(part, indices)


@contextmanager
def connected(address: str, secret: bytes, timeout_s: float = TIMEOUT_S) -> Iterator[BulkClient]:
    """A started client."""
    client = BulkClient(address, secret, timeout_s)
    client.start()
    try:
        yield client
    finally:
        client.close()


def random_store(seed: int, num_pieces: int = 40, index_bytes: int = 24) -> FlatStore:
    data = np.random.default_rng(seed).integers(0, 256, (2, num_pieces * index_bytes - 3), dtype=np.uint8)
    return FlatStore(list(data), index_bytes)


def item(store: str, part: int, *indices: int) -> BulkItem:
    return BulkItem(store, part, np.array(indices, dtype=np.int64))


class Received:
    """A sink: the bytes received of each item, in order of arrival."""

    def __init__(self) -> None:
        self._bytes: dict[int, bytearray] = {}
        self.num_chunks = 0

    def __call__(self, item: BulkItem, indices: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> None:
        self._bytes.setdefault(id(item), bytearray()).extend(data.tobytes())
        self.num_chunks += 1

    def of(self, item: BulkItem) -> bytes:
        return bytes(self._bytes.get(id(item), b""))


def expected(store: FlatStore, item: BulkItem) -> bytes:
    return b"".join(store.piece(item.part, int(index)).tobytes() for index in item.indices)


@contextmanager
def serving(
    gate: Callable[[], object] = lambda: None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    stall_s: float = STALL_S,
    **stores: FlatStore,
) -> Iterator[BulkServer]:
    server = BulkServer(bind(LOCAL, 0), gate, chunk_bytes=chunk_bytes, stall_s=stall_s)
    server.admit(SECRET)
    for name, store in stores.items():
        server.serve(name, store, store.index_bytes)
    server.start()
    try:
        yield server
    finally:
        server.close()


# -- a relay between one client and a server ---------------------------------------------------------------------------


class Cut(Exception):
    """The relay sends the start of a frame, and closes the connection."""


class Silence(Exception):
    """The relay sends nothing more, and keeps the connection open."""


Alter = Callable[[int, Frame], Frame]
"""Maps (number of the reply, reply) to the frame that is sent instead; raises ``Cut`` or ``Silence``."""


@contextmanager
def relaying(server: BulkServer, alter: Alter) -> Iterator[str]:
    """Yield the address of a relay for one client."""
    with bind(LOCAL, 0) as listener, socket.create_connection(split_address(server.address, "")) as upstream:
        listener.listen()
        thread = threading.Thread(target=_relay, args=(listener, upstream, alter), daemon=True)
        thread.start()
        try:
            yield f"{LOCAL}:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):  # the client or the server has closed the connection, so the relay has, too
                upstream.shutdown(socket.SHUT_RDWR)
            thread.join()


def _relay(listener: socket.socket, upstream: socket.socket, alter: Alter) -> None:
    downstream, _ = listener.accept()
    with downstream:
        upstream.sendall(downstream.recv(HELLO_BYTES, socket.MSG_WAITALL))
        downstream.sendall(upstream.recv(1))
        asking = threading.Thread(target=_pump, args=(downstream, upstream), daemon=True)
        asking.start()
        _answer(FrameSocket(upstream, MAX_CHUNK_BYTES), downstream, alter)
        asking.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # one end has closed the connection
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


def _answer(upstream: FrameSocket, downstream: socket.socket, alter: Alter) -> None:
    number, sent = 0, FrameSocket(downstream, 0)
    try:
        while True:
            frame = upstream.read()
            try:
                sent.send(alter(number, frame))
            except Cut:
                downstream.sendall(b"\0\0\0\x02")  # a part of a frame's header
                sent.close()
                return
            except Silence:
                return
            number += 1
    except PeerLost:
        sent.close()


def damage(frame: Frame, position: int) -> Frame:
    """Return the frame with one bit of its bytes changed."""
    data = frame.data.copy()
    data[position % len(data)] ^= 1 << position % 8
    return replace(frame, data=data)


def forge(frame: Frame) -> Frame:
    """Return the frame with the digest of its current bytes."""
    return replace(frame, body={**frame.body, "digest": compute_digest(frame.data)})


LONG_S = 2 * HANG_S
"""A timeout that no test waits for."""
KV = random_store(1)
PARAMETERS = random_store(2, num_pieces=2100, index_bytes=7)
WIDE = random_store(3, num_pieces=3, index_bytes=5 * CHUNK_BYTES)
STORES = {"kv": KV, "parameters": PARAMETERS, "wide": WIDE}


def whole(part: int = 0) -> BulkItem:
    """Return an item with all pieces of one part of ``KV``."""
    return item("kv", part, *range(40))
