"""An instance that can be source and target of migrations of running requests with their KV (Llumnix, 4.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from floodplain.cluster.bulk.kv_copies import KV
from floodplain.cluster.bulk.server import BulkServer
from floodplain.cluster.groups.droppable import find_own_host
from floodplain.cluster.instance.instance import Replica
from floodplain.cluster.migration.ends import HeldKvStore
from floodplain.cluster.migration.life import MovableLife
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Hello, Welcome
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import OpenedEngine, open_engine
from floodplain.engine.config import EngineConfig
from floodplain.web.listen import bind


class Movable(Replica):
    """A ``Replica`` whose running requests can migrate to and from other instances with their KV.

    Args:
        opened: The opened engine.
        host: The address at which other instances reach this process.

    Attributes:
        bulk_gate: Called before each chunk that is sent to another instance; it returns when the chunk may be sent.
    """

    def __init__(self, opened: OpenedEngine, host: str) -> None:
        super().__init__(AsyncEngine(opened.engine))
        self.bulk_gate: Callable[[], None] = lambda: None
        self._pool, self._store = opened.pool, HeldKvStore(opened.pool)
        self._bulk = BulkServer(bind(host, 0), lambda: self.bulk_gate())

    async def start(self) -> None:
        """Start the engine and the bulk server."""
        await super().start()
        self._bulk.serve(KV, self._store, self._pool.layout.layer_block_bytes)
        self._bulk.start()

    async def close(self) -> None:
        """Close the bulk server, then the engine."""
        await asyncio.to_thread(self._bulk.close)
        await super().close()

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this instance, with ``can_move``."""
        return replace(super().hello(token), can_move=True)

    async def live(self, link: FrameLink, welcome: Welcome, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """Serve one life; migrations under way end with it."""
        life = MovableLife(link, welcome, self.engine, self._pool, self._store, self._bulk)
        try:
            await life.run(is_stopping, drain_timeout_s)
        finally:
            await life.end_migrations()


def open_movable(config: EngineConfig, front_host: str) -> Movable:
    """Load a model into an instance whose requests can migrate.

    Args:
        config: The engine flags.
        front_host: The front's host: its network is the one over which other instances reach this one.

    Raises:
        UserError: As ``open_engine``.
    """
    opened = open_engine(config)
    try:
        return Movable(opened, find_own_host(front_host))
    except BaseException:
        opened.engine.close()
        raise
