"""An instance that can be source and target of migrations of running requests with their KV (Llumnix, 4.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from floodplain.cluster.bulk.kv_copies import KV
from floodplain.cluster.bulk.server import BulkServer
from floodplain.cluster.instance.instance import Replica, find_own_host
from floodplain.cluster.instance.session import Role, Session
from floodplain.cluster.migration.ends import HeldKvStore, SourceEnd, TargetEnd
from floodplain.cluster.wire.messages import RouterMessage
from floodplain.cluster.wire.migration_messages import (
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
from floodplain.engine.build import open_engine
from floodplain.engine.config import EngineConfig
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.migration import Stopped
from floodplain.web.listen import bind


class Movable:
    """The KV that other instances copy in a migration, and the server from which they copy it.

    Args:
        pool: The engine's KV pool.
        host: The address at which other instances reach this process.

    Attributes:
        pool: As above.
        store: The blocks of the pool that others may read.
        bulk: The server of the store.
        bulk_gate: Called before each chunk that is sent to another instance; it returns when the chunk may be sent.
    """

    def __init__(self, pool: KVPool, host: str) -> None:
        self.pool, self.store = pool, HeldKvStore(pool)
        self.bulk_gate: Callable[[], None] = lambda: None
        self.bulk = BulkServer(bind(host, 0), lambda: self.bulk_gate())

    def start(self) -> None:
        """Start the bulk server."""
        self.bulk.serve(KV, self.store, self.pool.layout.layer_block_bytes)
        self.bulk.start()

    def close(self) -> None:
        """Close the bulk server."""
        self.bulk.close()


def open_movable(config: EngineConfig, router_host: str) -> Replica:
    """Load a model into an instance whose requests can migrate.

    Args:
        config: The engine flags.
        front_host: The router's host: its network is the one over which other instances reach this one.

    Raises:
        UserError: As ``open_engine``.
    """
    opened = open_engine(config)
    try:
        engine, movable = AsyncEngine(opened.engine), Movable(opened.pool, find_own_host(router_host))
        return Replica(engine, movable, partial(MigrationRole, engine=engine, movable=movable), can_move=True)
    except BaseException:
        opened.engine.close()
        raise


class MigrationRole(Role):
    """Executes migration orders, as source or target.

    Args:
        session: The session.
        engine: The started engine.
        movable: Its KV.
    """

    def __init__(self, session: Session, engine: AsyncEngine, movable: Movable) -> None:
        super().__init__(session)
        self._engine, self._movable = engine, movable
        self._sources: dict[int, tuple[SourceEnd, int, bytes]] = {}  # by migration; with the ticket and the secret
        self._targets: dict[int, TargetEnd] = {}
        self._closings: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """End all migrations. On return no copy runs, and the engine has been told to free their blocks."""
        for number in list(self._sources):
            self._release_source(number)
        for number in list(self._targets):
            self._close_target(number)
        await asyncio.gather(*self._closings)

    # -- orders --------------------------------------------------------------------------------------------------------

    def take(self, message: RouterMessage, integers: tuple[int, ...]) -> bool:
        """Execute a migration order; see ``Role.take``."""
        if not isinstance(message, MigrationOrder):
            return False
        taken = self._session.streams.get(message.submit.ticket) if isinstance(message, GoOn) else None
        check_migration_order(message, integers, taken)
        self._obey(message, integers)
        return True

    def _obey(self, order: MigrationOrder, integers: tuple[int, ...]) -> None:
        """Execute an order. The engine gets it at once, so that orders take effect in sequence."""
        match order:
            case HoldKv():
                self._hold(order)
            case PullKv():
                target = self._targets.get(order.number)
                if target is None:
                    target = TargetEnd(self._engine, self._movable.pool, bytes.fromhex(order.secret))
                    self._targets[order.number] = target
                self._session.start(self._pull(order, target.pull(order.address, integers)))
            case StopRequest() if order.number in self._sources:
                source, ticket, _ = self._sources[order.number]
                self._session.start(self._stop(order, ticket, source.stop(order.num_copied)))
            case GoOn():
                self._go_on(order, integers)
            case ReleaseKv():
                self._release_source(order.number)
                self._close_target(order.number)

    # -- as source -----------------------------------------------------------------------------------------------------

    def _hold(self, order: HoldKv) -> None:
        request = self._session.requests.get(order.ticket)
        if request is None:
            self._session.send(KvHeld(self._session.epoch, order.number, False, self._movable.bulk.address))
            return
        if order.number not in self._sources:
            secret = bytes.fromhex(order.secret)
            self._sources[order.number] = SourceEnd(self._engine, self._movable.store, request), order.ticket, secret
            self._movable.bulk.admit(secret)
        self._session.start(self._say_held(order, self._sources[order.number][0].hold(order.num_copied)))

    async def _say_held(self, order: HoldKv, holding: asyncio.Future[Sequence[BlockId] | None]) -> None:
        blocks = await holding
        self._session.send(
            KvHeld(self._session.epoch, order.number, blocks is not None, self._movable.bulk.address), blocks or ()
        )

    async def _stop(
        self, order: StopRequest, ticket: int, stopping: asyncio.Future[tuple[Stopped, Sequence[BlockId]] | None]
    ) -> None:
        found = await stopping
        if found is None:
            self._session.send(RequestStopped(self._session.epoch, order.number, False, 0, 0))
            return
        stopped, blocks = found
        await self._session.wait_tokens(ticket, stopped.num_tokens)
        self._session.flush()
        self._session.send(
            RequestStopped(self._session.epoch, order.number, True, stopped.num_tokens, stopped.num_computed),
            list(blocks),
        )
        if ticket in self._session.streams:
            self._session.streams[ticket].cancel()

    def _release_source(self, number: int) -> None:
        found = self._sources.pop(number, None)
        if found is not None:
            found[0].release()
            self._movable.bulk.revoke(found[2])

    # -- as target -----------------------------------------------------------------------------------------------------

    async def _pull(self, order: PullKv, pulling: Coroutine[Any, Any, bool]) -> None:
        self._session.send(KvPulled(self._session.epoch, order.number, await pulling))

    def _close_target(self, number: int) -> None:
        if number in self._targets:
            task = asyncio.create_task(self._targets.pop(number).close())
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    # -- as either -----------------------------------------------------------------------------------------------------

    def _go_on(self, order: GoOn, token_ids: tuple[int, ...]) -> None:
        """Resume the request. When its stream ends, blocks that were not adopted are freed."""
        number, begin = order.number, partial(self._session.begin, order.submit, token_ids)
        if number in self._targets:
            stream = begin(partial(self._targets[number].adopt, order.num_computed))
            stream.add_done_callback(lambda _: self._close_target(number))
        elif number in self._sources:
            begin(self._sources[number][0].adopt).add_done_callback(lambda _: self._release_source(number))
        else:
            begin()
