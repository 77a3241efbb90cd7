"""One life of an instance whose requests can migrate: executes the front's orders as source or target."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from floodplain.cluster.bulk.server import BulkServer
from floodplain.cluster.instance.life import Life
from floodplain.cluster.migration.ends import HeldKvStore, SourceEnd, TargetEnd
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import FrontMessage, Welcome
from floodplain.cluster.wire.migration_messages import (
    MIGRATION_ORDERS,
    GoOn,
    HoldKv,
    KvHeld,
    KvPulled,
    MigrationOrder,
    PullKv,
    ReleaseKv,
    RequestStopped,
    StopRequest,
)
from floodplain.cluster.wire.order_checks import check_migration_order
from floodplain.core.free_blocks import BlockId
from floodplain.engine.async_engine import AsyncEngine
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.migration import Stopped


class MovableLife(Life):
    """A life that also executes migration orders.

    Args:
        link: To the front.
        welcome: The front's answer to the hello.
        engine: The started engine.
        pool: The engine's KV pool.
        store: The blocks of the pool that others may read.
        bulk: The server of the store.
    """

    def __init__(
        self, link: FrameLink, welcome: Welcome, engine: AsyncEngine, pool: KVPool, store: HeldKvStore, bulk: BulkServer
    ) -> None:
        super().__init__(link, welcome, engine)
        self._own, self._pool, self._store, self._bulk = engine, pool, store, bulk
        self._sources: dict[int, tuple[SourceEnd, int, bytes]] = {}  # by migration; with the ticket and the secret
        self._targets: dict[int, TargetEnd] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None

    def find_failure(self) -> BaseException | None:
        """The failure of the engine, or of an order; None if there is none."""
        return self._own.failure or self._failed

    async def end_migrations(self) -> None:
        """End all migrations. On return no copy runs, and the engine has been told to free their blocks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for number in list(self._sources):
            self._release_source(number)
        for number in list(self._targets):
            self._close_target(number)
        await asyncio.gather(*self._closings)

    # -- orders --------------------------------------------------------------------------------------------------------

    def _take(self, message: FrontMessage, token_ids: tuple[int, ...]) -> None:
        if not isinstance(message, MIGRATION_ORDERS):
            super()._take(message, token_ids)
        elif message.epoch == self._epoch:
            taken = self._streams.get(message.submit.ticket) if isinstance(message, GoOn) else None
            check_migration_order(message, token_ids, taken)
            self._obey(message, token_ids)

    def _obey(self, order: MigrationOrder, integers: tuple[int, ...]) -> None:
        """Execute an order. The engine gets it at once, so that orders take effect in sequence."""
        match order:
            case HoldKv():
                self._hold(order)
            case PullKv():
                target = self._targets.get(order.number)
                if target is None:
                    target = TargetEnd(self._own, self._pool, bytes.fromhex(order.secret))
                    self._targets[order.number] = target
                self._start(self._pull(order, target.pull(order.address, integers)))
            case StopRequest() if order.number in self._sources:
                source, ticket, _ = self._sources[order.number]
                self._start(self._stop(order, ticket, source.stop(order.num_copied)))
            case GoOn():
                self._go_on(order, integers)
            case ReleaseKv():
                self._release_source(order.number)
                self._close_target(order.number)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()

    # -- as source -----------------------------------------------------------------------------------------------------

    def _hold(self, order: HoldKv) -> None:
        request = self._requests.get(order.ticket)
        if request is None:
            self._send(KvHeld(self._epoch, order.number, False, self._bulk.address))
            return
        if order.number not in self._sources:
            secret = bytes.fromhex(order.secret)
            self._sources[order.number] = SourceEnd(self._own, self._store, request), order.ticket, secret
            self._bulk.admit(secret)
        self._start(self._say_held(order, self._sources[order.number][0].hold(order.num_copied)))

    async def _say_held(self, order: HoldKv, holding: asyncio.Future[Sequence[BlockId] | None]) -> None:
        blocks = await holding
        self._send(KvHeld(self._epoch, order.number, blocks is not None, self._bulk.address), blocks or ())

    async def _stop(
        self, order: StopRequest, ticket: int, stopping: asyncio.Future[tuple[Stopped, Sequence[BlockId]] | None]
    ) -> None:
        found = await stopping
        if found is None:
            self._send(RequestStopped(self._epoch, order.number, False, 0, 0))
            return
        stopped, blocks = found
        while self._num_known.get(ticket, stopped.num_tokens) < stopped.num_tokens:
            await asyncio.sleep(0)  # its stream is about to run
        self._flush()
        self._send(
            RequestStopped(self._epoch, order.number, True, stopped.num_tokens, stopped.num_computed), list(blocks)
        )
        if ticket in self._streams:
            self._streams[ticket].cancel()

    def _release_source(self, number: int) -> None:
        found = self._sources.pop(number, None)
        if found is not None:
            found[0].release()
            self._bulk.revoke(found[2])

    # -- as target -----------------------------------------------------------------------------------------------------

    async def _pull(self, order: PullKv, pulling: Coroutine[Any, Any, bool]) -> None:
        self._send(KvPulled(self._epoch, order.number, await pulling))

    def _close_target(self, number: int) -> None:
        if number in self._targets:
            task = asyncio.create_task(self._targets.pop(number).close())
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    # -- as either -----------------------------------------------------------------------------------------------------

    def _go_on(self, order: GoOn, token_ids: tuple[int, ...]) -> None:
        """Resume the request. When its stream ends, blocks that were not adopted are freed."""
        number, ticket = order.number, order.submit.ticket
        if number in self._targets:
            self._begin(order.submit, token_ids, partial(self._targets[number].adopt, order.num_computed))
            self._streams[ticket].add_done_callback(lambda _: self._close_target(number))
        elif number in self._sources:
            self._begin(order.submit, token_ids, self._sources[number][0].adopt)
            self._streams[ticket].add_done_callback(lambda _: self._release_source(number))
        else:
            self._begin(order.submit, token_ids)
