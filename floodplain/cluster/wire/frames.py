"""Frames of all connections of the cluster: a JSON object, integers and bytes; an asyncio and a blocking reader.

A frame is the lengths of its parts in bytes (big endian), then the parts: the object's text, the integers (little
endian), and between stages raw bytes. Nothing is executed; each length is checked before its part is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from floodplain.core.codec import WireError
from floodplain.core.errors import InvariantError, PeerLost

if TYPE_CHECKING:
    import torch  # not at run time: the router sends no tensors

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame between the router and an instance: sixteen million token ids."""
MAX_HELLO_BYTES = 16 * 2**10
"""Largest first frame, before the sender has shown its token."""
MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
UNREAD_S = 10.0
"""A peer that leaves more than ``MAX_UNSENT_BYTES`` unread for so long is disconnected. It may be sent more at once:
all requests of an instance that has ended, with long prompts."""
MAX_BODY_BYTES = 16 * 2**20
"""Most bytes of a frame's object and integers between stages; activations have a separate limit."""

_NO_INTEGERS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_BYTES: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One frame. ``data`` has raw bytes of a tensor; ``tensor``, on a device, replaces it on a ``DeviceLink``."""

    body: dict[str, Any]
    integers: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_INTEGERS)
    data: npt.NDArray[np.uint8] = field(default_factory=lambda: _NO_BYTES)
    tensor: torch.Tensor | None = None


class FrameFormat:
    """The layout of frames. ``head`` has the lengths of the text, the integers and, if any, the raw bytes."""

    def __init__(self, head: str, integer: str) -> None:
        self._head, self._integer = struct.Struct(head), np.dtype(integer)
        self.head_bytes = self._head.size

    def pack(self, body: dict[str, Any], integers: npt.ArrayLike, *num_data: int) -> bytes:
        """The bytes of a frame before its raw bytes, ``num_data`` in number."""
        text = json.dumps(body, separators=(",", ":")).encode()
        packed = np.asarray(integers, self._integer).tobytes()
        return self._head.pack(len(text), len(packed), *num_data) + text + packed

    def read_head(self, head: bytes, max_body_bytes: int, max_data_bytes: int = 0) -> list[int]:
        """The lengths of the parts. Raises ``WireError`` if they are longer than allowed."""
        num_text, num_integers, *num_data = self._head.unpack(head)
        if num_text + num_integers > max_body_bytes or num_integers % self._integer.itemsize:
            raise WireError(f"a frame of {num_text + num_integers} bytes, of which {max_body_bytes} are allowed")
        if sum(num_data) > max_data_bytes:
            raise WireError(f"a frame with {sum(num_data)} raw bytes, of which {max_data_bytes} are allowed")
        return [num_text, num_integers, *num_data]

    def read(self, text: bytes, integers: Any, *data: Any) -> Frame:
        """The frame of these parts. Raises ``WireError`` if the text is no JSON object."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise WireError("a frame is no JSON") from None
        if not isinstance(body, dict):
            raise WireError("a frame is no JSON object")
        return Frame(body, np.frombuffer(integers, self._integer), *data)


CONTROL = FrameFormat("!II", "<i4")
"""Between the router and an instance; the integers are token ids and block ids."""
STAGE = FrameFormat("!IIQ", "<i8")
"""Between stages of a pipeline, and of bulk transfers."""


class FrameLink:
    """Sends and receives ``CONTROL`` frames on an asyncio connection. ``close`` it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._writer, self._clock = reader, writer, clock
        self._short_s = clock()  # when at most ``MAX_UNSENT_BYTES`` were unread last

    async def read(
        self, max_bytes: int = MAX_FRAME_BYTES, timeout_s: float | None = None
    ) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """(object, integers) of the next frame; None at the end or after ``timeout_s``. ``WireError`` if malformed."""
        try:
            async with asyncio.timeout(timeout_s):
                sizes = CONTROL.read_head(await self._reader.readexactly(CONTROL.head_bytes), max_bytes)
                text, integers = [await self._reader.readexactly(size) for size in sizes]
        except (OSError, asyncio.IncompleteReadError):  # an OSError is a timeout, too
            return None
        frame = CONTROL.read(text, integers)
        return frame.body, tuple(frame.integers.tolist())

    def send(self, frame: bytes) -> None:
        """Queue a frame for sending. A peer that leaves too much unread for too long is disconnected."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() <= MAX_UNSENT_BYTES:
            self._short_s = self._clock()
        elif self._clock() - self._short_s > UNREAD_S:
            self.abort()
            return
        self._writer.write(frame)

    def abort(self) -> None:
        """Disconnect at once: unsent data is lost, and ``read`` returns None."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is queued, within a second, and disconnect."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()


class FrameSocket:
    """Sends and receives ``STAGE`` frames on a blocking socket, which it owns.

    ``send`` and ``read`` may run on two threads; ``close`` ends both. A frame that is read has at most
    ``max_data_bytes`` raw bytes. Raises ``InvariantError`` if this machine is big endian.
    """

    def __init__(self, sock: socket.socket, max_data_bytes: int) -> None:
        if sys.byteorder != "little":
            raise InvariantError("frames between stages are little endian, and this machine is not")
        self._sock = sock
        self._max_data_bytes = max_data_bytes
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send a frame without a tensor; blocks while the peer does not read. Raises ``PeerLost`` if it is gone."""
        if frame.tensor is not None:
            raise InvariantError("a tensor is sent over a connection that carries none")
        try:
            with self._sending:
                self._sock.sendall(STAGE.pack(frame.body, frame.integers, frame.data.nbytes))
                if frame.data.nbytes:
                    self._sock.sendall(np.ascontiguousarray(frame.data).data)
        except OSError as error:
            raise PeerLost(f"a stage's connection ended while a frame was sent ({error})") from None

    def read(self) -> Frame:
        """The next frame; blocks until it arrives. Raises ``PeerLost`` if the peer is gone or the data is no frame."""
        try:
            head = self._read_exactly(STAGE.head_bytes)
            sizes = STAGE.read_head(head.tobytes(), MAX_BODY_BYTES, self._max_data_bytes)
            text, integers, data = [self._read_exactly(size) for size in sizes]
            return STAGE.read(text.tobytes(), integers, data)
        except WireError as error:
            raise PeerLost(f"a stage breaks the protocol: {error}") from None

    def close(self) -> None:
        """Close the connection: a blocked ``send`` or ``read`` fails. Safe to call twice."""
        with contextlib.suppress(OSError):  # the peer has disconnected, or this end
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read_exactly(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        buffer = np.empty(num_bytes, dtype=np.uint8)
        view = memoryview(buffer.data)
        while len(view):
            try:
                num_read = self._sock.recv_into(view)
            except OSError as error:
                raise PeerLost(f"a stage's connection ended ({error})") from None
            if not num_read:
                raise PeerLost("a stage hung up")
            view = view[num_read:]
        return buffer
