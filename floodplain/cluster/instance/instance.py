"""An instance with a whole model: its engine computes requests of the router, and has no clients of its own.

Its role in a session, and what it shares with other instances, make it one that can drop layers or move requests.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
from collections.abc import Callable
from typing import Protocol

from floodplain import __version__
from floodplain.cluster.instance.session import Role, Session
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Hello, InstanceFacts, Welcome
from floodplain.engine.async_engine import AsyncEngine


class Shared(Protocol):
    """What an instance shares with others, for all its sessions."""

    def start(self) -> None:
        """Start to serve; the engine has started."""
        ...

    def close(self) -> None:
        """End, and block until no other instance reads anything; the engine still runs."""
        ...


class Replica:
    """A ``Member`` with a whole model.

    Args:
        engine: The engine, not yet started.
        shared: What it shares with other instances; None: nothing.
        open_role: Makes its role in a session.
        can_drop: As in ``Hello``, like ``can_move``.

    Attributes:
        engine: As above.
        shared: As above.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        shared: Shared | None = None,
        open_role: Callable[[Session], Role] = Role,
        *,
        can_drop: bool = False,
        can_move: bool = False,
    ) -> None:
        self.engine, self.shared = engine, shared
        self._open_role, self._can_drop, self._can_move = open_role, can_drop, can_move

    async def start(self) -> None:
        """Start the engine, then what is shared."""
        await self.engine.start()
        if self.shared is not None:
            self.shared.start()

    async def close(self) -> None:
        """Close what is shared, then the engine."""
        if self.shared is not None:
            await asyncio.to_thread(self.shared.close)
        await self.engine.close()

    async def rest(self) -> None:
        """Return when the engine has no step under way."""
        pause = await self.engine.pause()
        pause.release()

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this instance: its token, its facts and what it can do."""
        one = self.engine.engine
        ledger = one.loop.state.ledger
        facts = InstanceFacts(
            version=__version__,
            fingerprint=one.loop.state.config.fingerprint,
            dtype=one.config.dtype,
            max_model_len=one.max_model_len,
            block_tokens=ledger.block_tokens,
            num_blocks=ledger.num_blocks,
            host=platform.node(),
            pid=os.getpid(),
        )
        return Hello(token, facts, can_drop=self._can_drop, can_move=self._can_move)

    async def live(self, link: FrameLink, welcome: Welcome, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """Serve one session. If other instances that it needs are lost, the session ends, not the process."""
        await Session(link, welcome, self.engine, self._open_role).run(is_stopping, drain_timeout_s)


def find_own_host(router_host: str) -> str:
    """This machine's address in the router's network: the source address of a connection to the router."""
    family, kind, proto, _, address = socket.getaddrinfo(router_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(address)  # of a datagram socket: nothing is sent
        return str(sock.getsockname()[0])
