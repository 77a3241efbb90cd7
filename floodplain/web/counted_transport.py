"""A transport that knows how many bytes of what was written the client's machine has taken."""

from __future__ import annotations

import asyncio
from typing import Any


class CountedTransport(asyncio.Transport):
    """Counts what is written to ``transport``, and hands everything on."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._num_written_bytes = 0

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that were written and not yet sent."""
        return self._transport.get_write_buffer_size()

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that were written and have been sent."""
        return self._num_written_bytes - self.num_waiting_bytes

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """See ``asyncio.WriteTransport``."""
        self._num_written_bytes += len(data)
        self._transport.write(data)

    def write_eof(self) -> None:
        """See ``asyncio.WriteTransport``."""
        self._transport.write_eof()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See ``asyncio.BaseTransport``."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """See ``asyncio.BaseTransport``."""
        return self._transport.is_closing()

    def close(self) -> None:
        """See ``asyncio.BaseTransport``."""
        self._transport.close()

    def abort(self) -> None:
        """See ``asyncio.WriteTransport``."""
        self._transport.abort()

    def pause_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._transport.resume_reading()
