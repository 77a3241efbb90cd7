"""Frames between stages of a pipeline: a JSON object, 64-bit integers and raw bytes, on a blocking socket.

A frame is three lengths (big endian), the object's bytes, the integers and the bytes (little endian, as they lie in
memory). Nothing of it is ever executed, and a length is checked before a byte of what it announces is read.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from floodplain.core.errors import InvariantError, PeerLost

MAX_BODY_BYTES = 16 * 2**20
"""Most bytes of a frame's object and integers; activations have a separate limit."""

_HEAD = struct.Struct("!IIQ")
_NO_INTEGERS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_BYTES: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message between stages.

    Attributes:
        body: A JSON object.
        integers: int64, beside the object.
        data: Raw bytes of a tensor, uint8.
        tensor: Activations on a device, in place of ``data``. Only a ``DeviceLink`` can send them.
    """

    body: dict[str, Any]
    integers: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_INTEGERS)
    data: npt.NDArray[np.uint8] = field(default_factory=lambda: _NO_BYTES)
    tensor: torch.Tensor | None = None


class FrameSocket:
    """Sends and receives frames on one connection. ``send`` and ``read`` may run on two threads; ``close`` ends both.

    Args:
        sock: A connected, blocking socket; owned from now on.
        max_data_bytes: Most raw bytes of a frame that the peer may send.

    Raises:
        InvariantError: This machine's byte order is not that of the frames.
    """

    def __init__(self, sock: socket.socket, max_data_bytes: int) -> None:
        if sys.byteorder != "little":
            raise InvariantError("frames between stages are little endian, and this machine is not")
        self._sock = sock
        self._max_data_bytes = max_data_bytes
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send a frame; blocks while the peer does not read.

        Raises:
            PeerLost: The connection has ended, or ``close`` was called.
            InvariantError: The frame has a tensor.
        """
        if frame.tensor is not None:
            raise InvariantError("a tensor is sent over a connection that carries none")
        text = json.dumps(frame.body, separators=(",", ":")).encode()
        head = _HEAD.pack(len(text), frame.integers.nbytes, frame.data.nbytes)
        try:
            with self._sending:
                self._sock.sendall(b"".join((head, text, frame.integers.tobytes())))
                if frame.data.nbytes:
                    self._sock.sendall(np.ascontiguousarray(frame.data).data)
        except OSError as error:
            raise PeerLost(f"a stage's connection ended while a frame was sent ({error})") from None

    def read(self) -> Frame:
        """The next frame; blocks until it arrives.

        Raises:
            PeerLost: The connection has ended, also within a frame, or the data is no frame.
        """
        num_text, num_integers, num_data = _HEAD.unpack(self._read_exactly(_HEAD.size).tobytes())
        if num_text + num_integers > MAX_BODY_BYTES or num_data > self._max_data_bytes or num_integers % 8:
            raise PeerLost(f"a stage announced a frame of {num_text}, {num_integers} and {num_data} bytes: too much")
        body = _parse(self._read_exactly(num_text).tobytes())
        integers = self._read_exactly(num_integers).view(np.int64) if num_integers else _NO_INTEGERS
        return Frame(body, integers, self._read_exactly(num_data))

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


def _parse(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise PeerLost("a stage sent what is no JSON") from None
    if not isinstance(body, dict):
        raise PeerLost("a stage sent what is no JSON object")
    return body
