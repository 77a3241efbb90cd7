"""A link between two pipeline stages: a connection that carries step plans and their activations.

The sender connects, and shows a secret that the front gave only to members of this pipeline. A thread reads frames as
they arrive, so that two stages which send to each other never block on each other's full buffers. KV and
parameters have their own connections (``bulk/server.py``), so that activations never queue behind them.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import socket
import struct
import threading
from dataclasses import dataclass

from floodplain.cluster.wire.stage_frames import Frame, FrameSocket
from floodplain.core.errors import InvariantError, PeerLost
from floodplain.web.accepting import RETRY_S, SCARCE

HELLO_TIMEOUT_S = 5.0
"""A connection that has sent no hello after this time is closed."""
MAX_STRANGERS = 64
"""Most connections without a hello; one more closes the oldest of them."""
SECRET_BYTES = 32
MAX_UNREAD = 64
"""Most unread frames of a link; no pipeline has so many outstanding steps."""

_MAGIC = b"FPSL"
_HELLO = struct.Struct(f"!4sIH{SECRET_BYTES}s")
_YES = b"\x01"


@dataclass(frozen=True, slots=True)
class LinkKey:
    """The values that both ends of a link must agree on.

    Attributes:
        secret: Of the pipeline, ``SECRET_BYTES`` long.
        number: Of the pipeline: members of an older one are refused.
        sender: Number of the stage that connects.
    """

    secret: bytes
    number: int
    sender: int

    def hello(self) -> bytes:
        """The first bytes that the sender sends."""
        return _HELLO.pack(_MAGIC, self.number, self.sender, self.secret)

    def opens(self, hello: bytes) -> bool:
        """Whether these bytes are the hello of this link."""
        return hmac.compare_digest(self.hello(), hello)


class StageLink:
    """One end of a link; ``send`` and ``recv`` may be called on two threads.

    Args:
        sock: A connected socket.
        max_data_bytes: Most raw bytes of a frame.

    Attributes:
        carries_tensors: Always False: activations are sent as raw bytes of a frame.
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
        """The next frame, in the order of sending.

        Raises:
            PeerLost: The link has ended, and every frame that arrived was returned.
        """
        if self._lost is None:
            frame = self._frames.get()
            if isinstance(frame, Frame):
                return frame
            self._lost = frame
        raise self._lost

    @property
    def has_ended(self) -> bool:
        """Whether no more frames arrive; frames that arrived may still be unread."""
        return not self._reader.is_alive()

    def wait_end(self) -> None:
        """Wait until the link has ended, by this end or the other."""
        self._reader.join()

    def close(self) -> None:
        """Close the link; a blocked ``send`` or ``recv`` raises ``PeerLost``. Safe to call twice, on any thread."""
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
    """Open a link to the stage that listens at ``host:port``.

    Raises:
        PeerLost: It cannot be reached, or refuses the key.
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
    """Wait for the connection that shows this key; others are closed. Cancel the call to give up.

    Args:
        listener: Listening and non-blocking; it stays open.
        key: Of the link.
        max_data_bytes: Most raw bytes of a frame.
    """
    return StageLink(_make_blocking(await _Door(listener, key).wait()), max_data_bytes)


class _Door:
    """Reads the hellos of several connections concurrently, until one shows the key."""

    def __init__(self, listener: socket.socket, key: LinkKey) -> None:
        self._listener, self._key = listener, key
        self._found: list[socket.socket] = []
        self._is_found = asyncio.Event()
        self._strangers: dict[asyncio.Task[None], None] = {}  # connections without a hello, oldest first

    async def wait(self) -> socket.socket:
        """The connection that shows the key; the caller owns it."""
        listening = asyncio.create_task(self._listen())
        waiting = asyncio.create_task(self._is_found.wait())
        found = None
        try:
            await asyncio.wait((listening, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not self._found:
                listening.result()  # raises: the listener is broken
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
    """``num_bytes`` bytes, or fewer if the connection ends."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < num_bytes and (more := await loop.sock_recv(sock, num_bytes - len(data))):
        data += more
    return data


def _make_blocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
