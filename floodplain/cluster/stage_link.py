"""The link from one stage of a pipeline to another: a connection that carries step plans with their activations.

The sender dials, and shows a secret that the front gave to the members of this pipeline alone. Frames are read by a
thread as they arrive, so that two stages which send to each other never wait for each other's full buffers. KV and
parameters have connections of their own (``bulk_server.py``), so that activations never wait behind them.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import socket
import struct
import threading
from dataclasses import dataclass

from floodplain.cluster.stage_frames import Frame, FrameSocket
from floodplain.core.errors import InvariantError, PeerLost
from floodplain.web.accepting import RETRY_S, SCARCE

HELLO_TIMEOUT_S = 5.0
"""For a stranger's hello, after which it is hung up on."""
MAX_STRANGERS = 64
"""Connections that have not said hello yet; the oldest is hung up on for one more."""
SECRET_BYTES = 32
MAX_UNREAD = 64
"""Activations that lie unread; no pipeline has so many steps under way."""

_MAGIC = b"FPSL"
_HELLO = struct.Struct(f"!4sIH{SECRET_BYTES}s")
_YES = b"\x01"


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

    def hello(self) -> bytes:
        """The first bytes of a connection."""
        return _HELLO.pack(_MAGIC, self.number, self.sender, self.secret)

    def opens(self, hello: bytes) -> bool:
        """Whether a hello is that of this link."""
        return hmac.compare_digest(self.hello(), hello)


class StageLink:
    """One end of a link; ``send`` and ``recv`` may be called on two threads.

    Args:
        sock: Connected.
        max_data_bytes: Most raw bytes of a frame.

    Attributes:
        carries_tensors: False: activations are raw bytes of a frame.
    """

    carries_tensors = False

    def __init__(self, sock: socket.socket, max_data_bytes: int) -> None:
        self._sock = FrameSocket(sock, max_data_bytes)
        self._frames: queue.SimpleQueue[Frame | PeerLost] = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self._reader = threading.Thread(target=self._read, name="floodplain-stage-link", daemon=True)
        self._reader.start()

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            PeerLost: The link has ended.
        """
        self._sock.send(frame)

    def recv(self) -> Frame:
        """The next frame, in the order in which they were sent.

        Raises:
            PeerLost: The link has ended, and all that came before was given out.
        """
        if self._lost is None:
            frame = self._frames.get()
            if isinstance(frame, Frame):
                return frame
            self._lost = frame
        raise self._lost

    @property
    def has_ended(self) -> bool:
        """Whether nothing more arrives, frames that wait for ``recv`` aside."""
        return not self._reader.is_alive()

    def wait_end(self) -> None:
        """Wait until the link has ended, by this end or the other."""
        self._reader.join()

    def close(self) -> None:
        """End the link; whoever waits on it gets ``PeerLost``. Safe to call twice, on any thread."""
        self._sock.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                frame = self._sock.read()
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
    try:
        sock = await _dial(host, port, key.hello())
    except OSError as error:
        raise PeerLost(f"the next stage at {host}:{port} cannot be reached ({error})") from None
    return StageLink(_make_blocking(sock), max_data_bytes)


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
    return StageLink(_make_blocking(await _Door(listener, key).wait()), max_data_bytes)


class _Door:
    """Connections whose hellos are read side by side, until one shows the key."""

    def __init__(self, listener: socket.socket, key: LinkKey) -> None:
        self._listener, self._key = listener, key
        self._found: list[socket.socket] = []
        self._is_found = asyncio.Event()
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def wait(self) -> socket.socket:
        """The connection; the caller owns it."""
        listening = asyncio.create_task(self._listen())
        waiting = asyncio.create_task(self._is_found.wait())
        found = None
        try:
            await asyncio.wait((listening, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not self._found:
                listening.result()  # the listener is broken
                raise InvariantError("a listener ends without an error")
            found = self._found[0]
            return found
        finally:
            tasks = [listening, waiting, *self._strangers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for sock in self._found if found is None else self._found[1:]:
                sock.close()

    async def _listen(self) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:
                if error.errno not in SCARCE:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._admit(sock))
            self._strangers[task] = None
            task.add_done_callback(lambda one: self._strangers.pop(one, None))

    async def _admit(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                if not self._key.opens(await _read_exactly(sock, _HELLO.size)) or self._found:
                    sock.close()
                    return
                await loop.sock_sendall(sock, _YES)
        except (OSError, TimeoutError):
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        self._found.append(sock)
        self._is_found.set()


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
