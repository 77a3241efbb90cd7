"""An instance whose running requests can move to another one with their KV, and that takes such (Llumnix, 4.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from floodplain.cluster.bulk_server import BulkServer
from floodplain.cluster.droppable import find_own_host
from floodplain.cluster.frames import FrameLink
from floodplain.cluster.instance import Replica
from floodplain.cluster.kv_copies import KV
from floodplain.cluster.messages import Hello, Welcome
from floodplain.cluster.migration_ends import HeldKvStore
from floodplain.cluster.movable_life import MovableLife
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import OpenedEngine, open_engine
from floodplain.engine.config import EngineConfig
from floodplain.web.listen import bind


class Movable(Replica):
    """See the module.

    Args:
        opened: Its engine.
        host: At which other instances reach this process.

    Attributes:
        bulk_gate: Called before each chunk that others get; it returns when that may be sent.
    """

    def __init__(self, opened: OpenedEngine, host: str) -> None:
        super().__init__(AsyncEngine(opened.engine))
        self.bulk_gate: Callable[[], None] = lambda: None
        self._pool, self._store = opened.pool, HeldKvStore(opened.pool)
        self._bulk = BulkServer(bind(host, 0), lambda: self.bulk_gate())

    async def start(self) -> None:
        """See ``Member``."""
        await super().start()
        self._bulk.serve(KV, self._store, self._pool.layout.layer_block_bytes)
        self._bulk.start()

    async def close(self) -> None:
        """See ``Member``."""
        await asyncio.to_thread(self._bulk.close)
        await super().close()

    def hello(self, token: str) -> Hello:
        """See ``Member``."""
        return replace(super().hello(token), can_move=True)

    async def live(self, link: FrameLink, welcome: Welcome, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """See ``Member``."""
        life = MovableLife(link, welcome, self.engine, self._pool, self._store, self._bulk)
        try:
            await life.run(is_stopping, drain_timeout_s)
        finally:
            await life.end_migrations()


def open_movable(config: EngineConfig, front_host: str) -> Movable:
    """Load a model, and let other instances copy KV of requests that move.

    Args:
        config: The engine flags.
        front_host: Where the front is: other instances reach this one from there, too.

    Raises:
        UserError: As ``open_engine``.
    """
    opened = open_engine(config)
    try:
        return Movable(opened, find_own_host(front_host))
    except BaseException:
        opened.engine.close()
        raise
