"""A link between two pipeline stages: a connection that carries step plans and their activations.

The sender connects, and shows a secret that the router gave only to members of this pipeline. A thread reads frames as
they arrive, so that two stages which send to each other never block on each other's full buffers.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import socket
import struct
import threading
from dataclasses import dataclass

from floodplain.cluster.wire.frames import Frame, FrameSocket
from floodplain.core.errors import PeerLost
from floodplain.web.accepting import Accepting

HELLO_TIMEOUT_S = 5.0
"""A connection that has sent no hello after this time is closed."""
MAX_UNADMITTED = 64
"""Most connections without a hello; one more closes the oldest of them."""
SECRET_BYTES = 32
MAX_UNREAD = 64
"""Most unread frames of a link; no pipeline has so many outstanding steps."""

_MAGIC = b"FPSL"
_HELLO = struct.Struct(f"!4sIH{SECRET_BYTES}s")
_YES = b"\x01"


@dataclass(frozen=True, slots=True)
class LinkKey:
    """What both ends of a link must agree on: the pipeline's secret and number, and the stage that connects."""

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
    """One end of a link. ``send`` and ``recv`` may be called on two threads.

    Raw bytes of a frame are at most ``max_data_bytes``. Activations are raw bytes: ``carries_tensors`` is False.
    """

    carries_tensors = False

    def __init__(self, sock: socket.socket, max_data_bytes: int) -> None:
        self._sock = FrameSocket(sock, max_data_bytes)
        self._frames: queue.SimpleQueue[Frame | PeerLost] = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self._reader = threading.Thread(target=self._read, name="floodplain-stage-link", daemon=True)
        self._reader.start()

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises ``PeerLost`` if the link has ended."""
        self._sock.send(frame)

    def recv(self) -> Frame:
        """The next frame. Raises ``PeerLost`` if the link has ended, and every frame that arrived was returned."""
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
    """Open a link to the stage at ``host:port``. Raises ``PeerLost`` if it is unreachable or refuses the key."""
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
    """Wait, on a listening non-blocking socket, for the connection with this key. Cancel it to give up."""
    return StageLink(_make_blocking(await _Door(listener, key).wait()), max_data_bytes)


class _Door(Accepting[socket.socket]):
    """Reads the hellos of several connections, until one shows the key.

    By callbacks, not tasks: a task that is cancelled while a connection is handed to it would lose the connection.
    """

    def __init__(self, listener: socket.socket, key: LinkKey) -> None:
        if_full = f"{MAX_UNADMITTED} connections to a stage have shown no key"
        super().__init__(listener, if_full=if_full, if_scarce="raise ulimit -n")
        self._key = key
        self._found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._unadmitted: dict[socket.socket, tuple[bytearray, asyncio.TimerHandle]] = {}  # oldest first

    async def wait(self) -> socket.socket:
        found = None
        self.open()
        try:
            found = await self._found
            return found
        finally:
            self.close()
            for sock in list(self._unadmitted):
                self.evict(sock)
            if found is None and self._found.done() and not self._found.cancelled():
                self._found.result().close()  # this call was cancelled after the connection was found

    @property
    def has_room(self) -> bool:
        return len(self._unadmitted) < MAX_UNADMITTED

    def take(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        accepted.setblocking(False)
        self._unadmitted[accepted] = bytearray(), loop.call_later(HELLO_TIMEOUT_S, self.evict, accepted)
        loop.add_reader(accepted, self._read, accepted)

    def find_victim(self) -> socket.socket | None:
        return next(iter(self._unadmitted), None)

    def evict(self, victim: socket.socket) -> None:
        self._release(victim)
        victim.close()

    def _read(self, sock: socket.socket) -> None:
        """Read a part of a hello. A whole one that shows the key is answered."""
        hello, _ = self._unadmitted[sock]
        try:
            more = sock.recv(_HELLO.size - len(hello))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            more = b""
        hello += more
        if more and len(hello) < _HELLO.size:
            return
        is_admitted = self._key.opens(bytes(hello)) and not self._found.done()
        self._release(sock)
        if is_admitted and _answer(sock):
            self._found.set_result(sock)
        else:
            sock.close()

    def _release(self, sock: socket.socket) -> None:
        _, timer = self._unadmitted.pop(sock)
        timer.cancel()
        asyncio.get_running_loop().remove_reader(sock)


def _answer(sock: socket.socket) -> bool:
    """Accept a hello. False if the connection has ended; one byte always fits into its buffer."""
    try:
        return sock.send(_YES) == len(_YES)
    except OSError:
        return False


def _make_blocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
