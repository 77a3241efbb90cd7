"""Frames between the front and its instances: a JSON object and an array of token ids.

A frame is two lengths (32 bits, big endian), the object's bytes, and the ids (32 bits, little endian). Nothing of it is
ever executed, and a length is checked before a byte of what it announces is read.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from floodplain.core.codec import WireError

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame: sixteen million token ids."""
MAX_HELLO_BYTES = 16 * 2**10
"""Largest first frame, before the sender has shown its token."""
MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
"""A peer that leaves more unread is disconnected."""

_HEAD = struct.Struct("!II")


def pack_frame(body: dict[str, Any], token_ids: Sequence[int] = ()) -> bytes:
    """The bytes of a frame."""
    text = json.dumps(body, separators=(",", ":")).encode()
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return _HEAD.pack(len(text), 4 * len(ids)) + text + ids.tobytes()


class FrameLink:
    """Sends and receives frames on one connection. ``close`` it.

    Args:
        reader: The reader of the connection.
        writer: The writer of the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int = MAX_FRAME_BYTES) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """The next frame: its object and its ids; None if the connection has ended.

        Raises:
            WireError: It is no frame, or larger than it may be.
        """
        try:
            num_text, num_ids = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            if num_text + num_ids > max_bytes or num_ids % 4:
                raise WireError(f"a frame of {num_text + num_ids} bytes, of which {max_bytes} are allowed")
            text = await self._reader.readexactly(num_text)
            tail = await self._reader.readexactly(num_ids)
        except (OSError, asyncio.IncompleteReadError):
            return None
        return _parse(text), _read_ids(tail)

    def send(self, frame: bytes) -> None:
        """Queue a frame for sending. A peer that leaves too much unread is disconnected."""
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort()

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


def _parse(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("a frame is no JSON") from None
    if not isinstance(body, dict):
        raise WireError("a frame is no JSON object")
    return body


def _read_ids(tail: bytes) -> tuple[int, ...]:
    ids = array("i", tail)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)
