"""A transport that counts the written bytes that have been sent."""

from __future__ import annotations

import asyncio
from typing import Any


class CountedTransport(asyncio.Transport):
    """Counts the bytes written to ``transport``, and forwards every call to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._num_written_bytes = 0

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that were written and are not yet sent."""
        return self._transport.get_write_buffer_size()

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that were written and sent."""
        return self._num_written_bytes - self.num_waiting_bytes

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Count ``data`` and write it."""
        self._num_written_bytes += len(data)
        self._transport.write(data)

    def write_eof(self) -> None:
        """Forward the call."""
        self._transport.write_eof()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Forward the call."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Forward the call."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Forward the call."""
        self._transport.close()

    def abort(self) -> None:
        """Forward the call."""
        self._transport.abort()

    def pause_reading(self) -> None:
        """Forward the call."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Forward the call."""
        self._transport.resume_reading()
