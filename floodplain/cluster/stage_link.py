"""The link from one stage of a pipeline to another: two connections, so that activations never wait behind bulk data.

The sender dials, and shows a secret that the front gave to the members of this pipeline alone. Activations are read by
a thread as they come, so that two stages which send to each other never wait for each other's full buffers; bulk data
is read when it is asked for, and its sender waits until then.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from floodplain.cluster.stage_frames import Frame, FrameSocket
from floodplain.core.errors import PeerLost

HELLO_TIMEOUT_S = 5.0
"""For a stranger's hello, after which it is hung up on."""
MAX_STRANGERS = 64
"""Connections that have not said hello yet; more are hung up on."""
SECRET_BYTES = 32
MAX_UNREAD = 64
"""Activations that lie unread; no pipeline has so many steps under way."""

_MAGIC = b"FPSL"
_HELLO = struct.Struct(f"!4sBIH{SECRET_BYTES}s")
_YES = b"\x01"
ACTIVATIONS, BULK = 0, 1


@dataclass(frozen=True, slots=True)
class LinkKey:
    """What both ends of a link must agree on.

    Attributes:
        secret: Of the pipeline, ``SECRET_BYTES`` long.
        number: Of the pipeline: a member of an older one is refused.
        sender: The stage that dials.
    """

    secret: bytes
    number: int
    sender: int

    def hello(self, kind: int) -> bytes:
        """The first bytes of a connection."""
        return _HELLO.pack(_MAGIC, kind, self.number, self.sender, self.secret)

    def kind_of(self, hello: bytes) -> int | None:
        """Which connection of this link a hello opens; None if it is another's."""
        kinds = [kind for kind in (ACTIVATIONS, BULK) if hmac.compare_digest(self.hello(kind), hello)]
        return kinds[0] if kinds else None


class StageLink:
    """One end of a link. ``send`` and ``recv`` carry activations, the other two bulk data; each on its own thread.

    Args:
        activations: Connected.
        bulk: Connected.
        max_data_bytes: Most raw bytes of a frame.
    """

    def __init__(self, activations: socket.socket, bulk: socket.socket, max_data_bytes: int) -> None:
        self._activations = FrameSocket(activations, max_data_bytes)
        self._bulk = FrameSocket(bulk, max_data_bytes)
        self._frames: queue.SimpleQueue[Frame | PeerLost] = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self._reader = threading.Thread(target=self._read, name="floodplain-stage-link", daemon=True)
        self._reader.start()

    def send(self, frame: Frame) -> None:
        """Send activations.

        Raises:
            PeerLost: The link has ended.
        """
        self._activations.send(frame)

    def recv(self) -> Frame:
        """The next activations, in the order in which they were sent.

        Raises:
            PeerLost: The link has ended, and all that came before was given out.
        """
        if self._lost is None:
            frame = self._frames.get()
            if isinstance(frame, Frame):
                return frame
            self._lost = frame
        raise self._lost

    def send_bulk(self, frame: Frame) -> None:
        """Send bulk data; wait while the other end does not ask for it.

        Raises:
            PeerLost: The link has ended.
        """
        self._bulk.send(frame)

    def recv_bulk(self) -> Frame:
        """The next bulk data.

        Raises:
            PeerLost: The link has ended.
        """
        return self._bulk.read()

    def close(self) -> None:
        """End the link; whoever waits on it gets ``PeerLost``. Safe to call twice, on any thread."""
        self._activations.close()
        self._bulk.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                frame = self._activations.read()
                if self._frames.qsize() >= MAX_UNREAD:
                    raise PeerLost(f"a stage sent more than {MAX_UNREAD} steps ahead")
                self._frames.put(frame)
        except PeerLost as error:
            self._frames.put(error)


async def dial_link(host: str, port: int, key: LinkKey, max_data_bytes: int) -> StageLink:
    """Open a link to the stage that listens there.

    Raises:
        PeerLost: It does not listen, or does not take the key.
    """
    socks: list[socket.socket] = []
    try:
        for kind in (ACTIVATIONS, BULK):
            socks.append(await _dial(host, port, key.hello(kind)))
    except OSError as error:
        _close_all(socks)
        raise PeerLost(f"the next stage at {host}:{port} cannot be reached ({error})") from None
    except BaseException:
        _close_all(socks)
        raise
    return StageLink(_make_blocking(socks[ACTIVATIONS]), _make_blocking(socks[BULK]), max_data_bytes)


async def _dial(host: str, port: int, hello: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, hello)
        if await loop.sock_recv(sock, 1) != _YES:
            raise PeerLost(f"the next stage at {host}:{port} does not take this pipeline's secret")
    except BaseException:
        sock.close()
        raise
    return sock


async def accept_link(listener: socket.socket, key: LinkKey, max_data_bytes: int) -> StageLink:
    """Wait for the link with this key; strangers are hung up on, and hold nothing up. Cancel it to give up.

    Args:
        listener: Listening, not blocking; it stays open.
        key: Of the link.
        max_data_bytes: Most raw bytes of a frame.
    """
    door = _Door(listener, key)
    try:
        await door.wait()
    except BaseException:
        _close_all(door.found.values())
        raise
    return StageLink(_make_blocking(door.found[ACTIVATIONS]), _make_blocking(door.found[BULK]), max_data_bytes)


class _Door:
    """Connections whose hellos are read side by side, until both of a link are there.

    Attributes:
        found: These, by kind.
    """

    def __init__(self, listener: socket.socket, key: LinkKey) -> None:
        self.found: dict[int, socket.socket] = {}
        self._listener, self._key = listener, key
        self._is_whole = asyncio.Event()
        self._strangers: set[asyncio.Task[None]] = set()

    async def wait(self) -> None:
        """Return when the link is whole."""
        listening = asyncio.create_task(self._listen())
        waiting = asyncio.create_task(self._is_whole.wait())
        try:
            await asyncio.wait((listening, waiting), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()  # the listener is broken
        finally:
            tasks = [listening, waiting, *self._strangers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            if len(self._strangers) >= MAX_STRANGERS:
                sock.close()
                continue
            task = asyncio.create_task(self._admit(sock))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    async def _admit(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                kind = self._key.kind_of(await _read_exactly(sock, _HELLO.size))
                if kind is None or kind in self.found:
                    sock.close()
                    return
                await loop.sock_sendall(sock, _YES)
        except (OSError, TimeoutError):
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        self.found[kind] = sock
        if len(self.found) == 2:
            self._is_whole.set()


async def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or fewer if the connection ends."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < num_bytes and (more := await loop.sock_recv(sock, num_bytes - len(data))):
        data += more
    return data


def _make_blocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _close_all(socks: Iterable[socket.socket]) -> None:
    for sock in socks:
        sock.close()
