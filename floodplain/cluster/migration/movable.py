"""An instance that can be source and target of migrations of running requests with their KV (Llumnix, 4.2).

Blocks are held, reserved and freed on the engine's thread, in the order of the router's messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from floodplain.cluster.bulk.kv_copies import KV, Puller, RequestCopy, write_pool
from floodplain.cluster.bulk.server import BulkServer, NotServed
from floodplain.cluster.instance.instance import Replica, find_own_host
from floodplain.cluster.instance.session import Role, Session
from floodplain.cluster.wire import messages as wire
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.engine.async_engine import AsyncEngine, settle
from floodplain.engine.build import open_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.memory.kv_layout import read_blocks
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.handover import Incoming, Outgoing, Stopped
from floodplain.web.address import bind

T = TypeVar("T")


class HeldKvStore:
    """A ``bulk.server.Store`` of blocks of a pool that are held for migrations. Part: a layer; indices: blocks."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    def hold(self, blocks: Iterable[int]) -> None:
        """Let these blocks be read; adds one hold to each."""
        with self._lock:
            self._held.update(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Undo one ``hold``."""
        with self._lock:
            self._held -= Counter(blocks)

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes of held blocks. The lock keeps them from being released, and so reused, during the read."""
        blocks = indices.tolist()
        with self._lock:
            if not all(block in self._held for block in blocks):
                raise NotServed("blocks are not held for a migration")
            return read_blocks(self._pool.words[part], blocks)


def call(engine: AsyncEngine, function: Callable[[Engine], T]) -> asyncio.Future[T]:
    """Call ``function`` on the engine's thread between steps, in order. If it raises, the engine ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    engine.post(lambda inner: loop.call_soon_threadsafe(settle, future, None, function(inner)))
    return future


class Movable:
    """The KV that other instances copy in a migration, and its server, which listens at the address ``host``."""

    def __init__(self, pool: KVPool, host: str) -> None:
        self.pool, self.store = pool, HeldKvStore(pool)
        self.bulk = BulkServer(bind(host, 0), lambda: None)

    def start(self) -> None:
        """Start the bulk server."""
        self.bulk.serve(KV, self.store, self.pool.layout.layer_block_bytes)
        self.bulk.start()

    def close(self) -> None:
        """Close the bulk server."""
        self.bulk.close()


class SourceEnd:
    """A migration of ``request`` at the source. ``hold``, ``stop``, ``adopt`` are called on the engine's thread."""

    def __init__(self, engine: AsyncEngine, movable: Movable, request: Request, order: wire.HoldKv) -> None:
        self.ticket, self._secret = order.ticket, bytes.fromhex(order.secret)
        self._engine, self._store, self._bulk = engine, movable.store, movable.bulk
        self._outgoing = Outgoing(engine.engine.loop, request)
        self._bulk.admit(self._secret)

    def hold(self, num_copied: int, _: Engine) -> Sequence[BlockId] | None:
        """Hold the sealed blocks. Those after ``num_copied``; None if the request does not run."""
        before = self._outgoing.blocks
        is_running = self._outgoing.hold_sealed()
        self._change(before)
        return self._outgoing.blocks[num_copied:] if is_running else None

    def stop(self, num_copied: int, engine: Engine) -> tuple[Stopped, Sequence[BlockId]] | None:
        """End the request and hold all its blocks. Those after ``num_copied``; None if it does not run."""
        before, stopped = self._outgoing.blocks, self._outgoing.stop(num_copied)
        self._change(before)
        if stopped is None:
            return None
        engine.finish(stopped.seq_id, FinishReason.ABORT)
        return stopped, self._outgoing.blocks[num_copied:]

    def adopt(self, engine: Engine, seq_id: SeqId) -> None:
        """Resume the request here from its blocks."""
        self._store.release(self._outgoing.blocks)
        self._outgoing.adopt(seq_id, engine.clock())

    def release(self) -> None:
        """Free the held blocks: nothing more is copied. Safe to call twice."""
        self._engine.post(lambda _: self._release())
        self._bulk.revoke(self._secret)

    def _change(self, before: Sequence[BlockId]) -> None:
        self._store.hold(self._outgoing.blocks)
        self._store.release(before)

    def _release(self) -> None:
        self._store.release(self._outgoing.blocks)
        self._outgoing.release()


class TargetEnd:
    """One migration at the target: the instance that is to resume the request. The source admits ``secret``."""

    def __init__(self, engine: AsyncEngine, pool: KVPool, secret: bytes) -> None:
        self._engine, self._pool = engine, pool
        self._incoming = Incoming(engine.engine.loop)
        self._puller = Puller(secret)
        self._copying: asyncio.Future[bool] | None = None
        self._is_closed = False

    def pull(self, address: str, sources: Sequence[int]) -> Coroutine[Any, Any, bool]:
        """Copy blocks in all layers. True if all arrived and were verified."""
        return self._copy(address, sources, call(self._engine, lambda _: self._incoming.reserve(len(sources))))

    async def _copy(
        self, address: str, sources: Sequence[int], reserved: asyncio.Future[Sequence[BlockId] | None]
    ) -> bool:
        targets = await reserved
        if targets is None or self._is_closed:
            return False
        one = RequestCopy(tuple(sources), tuple(targets), {address: range(self._pool.layout.num_layers)})
        self._copying = asyncio.ensure_future(asyncio.to_thread(self._puller.copy, one, write_pool(self._pool)))
        return await asyncio.shield(self._copying)

    def adopt(self, num_computed: int, engine: Engine, seq_id: SeqId) -> None:
        """Let the request run from the copied blocks. Called on the engine's thread."""
        self._incoming.adopt(seq_id, num_computed, engine.clock())

    async def close(self) -> None:
        """Disconnect, abort a copy, and free blocks that were not adopted. Safe to call twice."""
        self._is_closed = True
        self._puller.close()
        if self._copying is not None:
            await asyncio.gather(self._copying, return_exceptions=True)
        self._engine.post(lambda _: self._incoming.release())


def open_movable(config: EngineConfig, router_host: str) -> Replica:
    """An instance whose requests can migrate, in the network of ``router_host``. ``UserError`` as ``open_engine``."""
    opened = open_engine(config)
    try:
        engine, movable = AsyncEngine(opened.engine), Movable(opened.pool, find_own_host(router_host))
        return Replica(engine, movable, partial(MigrationRole, engine=engine, movable=movable), can_move=True)
    except BaseException:
        opened.engine.close()
        raise


class MigrationRole(Role):
    """Executes migration orders, as source or target."""

    orders = get_args(wire.MigrationOrder)

    def __init__(self, session: Session, engine: AsyncEngine, movable: Movable) -> None:
        super().__init__(session)
        self._engine, self._movable = engine, movable
        self._sources: dict[int, SourceEnd] = {}  # by migration
        self._targets: dict[int, TargetEnd] = {}
        self._closings: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """End all migrations. On return no copy runs, and the engine's thread will free their blocks."""
        for number in list(self._sources):
            self._release_source(number)
        for number in list(self._targets):
            self._close_target(number)
        await asyncio.gather(*self._closings)

    def obey(self, order: wire.MigrationOrder, integers: tuple[int, ...]) -> None:
        """Execute an order. The engine gets it at once, so that orders take effect in sequence."""
        match order:
            case wire.HoldKv():
                self._hold(order)
            case wire.PullKv():
                target = self._targets.get(order.number)
                if target is None:
                    target = TargetEnd(self._engine, self._movable.pool, bytes.fromhex(order.secret))
                    self._targets[order.number] = target
                self._session.start(self._pull(order, target.pull(order.address, integers)))
            case wire.StopRequest() if order.number in self._sources:
                source = self._sources[order.number]
                stopping = call(self._engine, partial(source.stop, order.num_copied))
                self._session.start(self._stop(order, source.ticket, stopping))
            case wire.GoOn():
                self._go_on(order, integers)
            case wire.ReleaseKv():
                self._release_source(order.number)
                self._close_target(order.number)

    def _hold(self, order: wire.HoldKv) -> None:
        request = self._session.requests.get(order.ticket)
        if request is None:
            self._session.send(wire.KvHeld(self._session.epoch, order.number, False, self._movable.bulk.address))
            return
        if order.number not in self._sources:
            self._sources[order.number] = SourceEnd(self._engine, self._movable, request, order)
        holding = call(self._engine, partial(self._sources[order.number].hold, order.num_copied))
        self._session.start(self._say_held(order, holding))

    async def _say_held(self, order: wire.HoldKv, holding: asyncio.Future[Sequence[BlockId] | None]) -> None:
        blocks = await holding
        self._session.send(
            wire.KvHeld(self._session.epoch, order.number, blocks is not None, self._movable.bulk.address), blocks or ()
        )

    async def _stop(
        self, order: wire.StopRequest, ticket: int, stopping: asyncio.Future[tuple[Stopped, Sequence[BlockId]] | None]
    ) -> None:
        found = await stopping
        if found is None:
            self._session.send(wire.RequestStopped(self._session.epoch, order.number, False, 0, 0))
            return
        stopped, blocks = found
        await self._session.wait_tokens(ticket, stopped.num_tokens)
        self._session.flush()
        self._session.send(
            wire.RequestStopped(self._session.epoch, order.number, True, stopped.num_tokens, stopped.num_computed),
            list(blocks),
        )
        if ticket in self._session.streams:
            self._session.streams[ticket].cancel()

    def _release_source(self, number: int) -> None:
        if number in self._sources:
            self._sources.pop(number).release()

    async def _pull(self, order: wire.PullKv, pulling: Coroutine[Any, Any, bool]) -> None:
        self._session.send(wire.KvPulled(self._session.epoch, order.number, await pulling))

    def _close_target(self, number: int) -> None:
        if number in self._targets:
            task = asyncio.create_task(self._targets.pop(number).close())
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    def _go_on(self, order: wire.GoOn, token_ids: tuple[int, ...]) -> None:
        """Resume the request. When its stream ends, blocks that were not adopted are freed."""
        number, begin = order.number, partial(self._session.begin, order.submit, token_ids)
        if number in self._targets:
            stream = begin(partial(self._targets[number].adopt, order.num_computed))
            stream.add_done_callback(lambda _: self._close_target(number))
        elif number in self._sources:
            begin(self._sources[number].adopt).add_done_callback(lambda _: self._release_source(number))
        else:
            begin()
