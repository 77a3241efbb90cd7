"""Links between stages inside one process: both ends, and raw connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from floodplain.cluster.wire.stage_link import LinkKey, StageLink, accept_link, dial_link
from floodplain.web.address import bind
from tests.support.waiting import HANG_S

KEY = LinkKey(bytes(range(32)), 7, 0)
MAX_DATA_BYTES = 2**24


def listen() -> socket.socket:
    sock = bind("127.0.0.1", 0)
    sock.listen()
    sock.setblocking(False)
    return sock


async def open_link(
    listener: socket.socket, key: LinkKey = KEY, max_data_bytes: int = MAX_DATA_BYTES
) -> tuple[StageLink, StageLink]:
    """Return (the sender's end, the receiver's end)."""
    accepting = asyncio.create_task(accept_link(listener, key, max_data_bytes))
    sender = await dial_link(*listener.getsockname()[:2], key, max_data_bytes)
    return sender, await accepting


@contextmanager
def linked(max_data_bytes: int = MAX_DATA_BYTES) -> Iterator[tuple[StageLink, StageLink]]:
    """Yield (the sender's end, the receiver's end); both are closed at the end."""
    with listen() as listener:
        ends = asyncio.run(asyncio.wait_for(open_link(listener, max_data_bytes=max_data_bytes), HANG_S))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
