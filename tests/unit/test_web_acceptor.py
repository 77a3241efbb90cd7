"""Accepted connections of the web server: none is lost when its task is cancelled."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from floodplain.web.limits import ConnectionLimits
from floodplain.web.serving import Acceptor


def test_a_connection_whose_task_is_cancelled_before_it_begins_is_closed() -> None:
    async def run() -> None:
        config: Any = SimpleNamespace()
        state: Any = SimpleNamespace(connections=set())
        ours, theirs = socket.socketpair()
        with socket.socket() as listener, theirs:
            acceptor = Acceptor(listener, config, state, {}, ConnectionLimits(max_connections=8))
            acceptor._make = asyncio.Protocol  # type: ignore[assignment]
            acceptor.open()
            acceptor.take(ours)
            [task] = acceptor._opening.values()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            acceptor.close()
            assert ours.fileno() == -1

    asyncio.run(run())
