"""The two ends of a migration in an instance: the source serves its blocks, the target copies them.

Blocks are held, reserved and freed on the engine's thread, in the order of the router's messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from floodplain.cluster.bulk.kv_copies import Puller, RequestCopy, write_pool
from floodplain.cluster.bulk.stores import NotServed
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.shell import Engine
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.migration import Incoming, Outgoing, Stopped

T = TypeVar("T")


class HeldKvStore:
    """A ``bulk.stores.Store`` of blocks that are held for migrations. Part: a layer; indices: blocks.

    Args:
        pool: The KV pool with the blocks.
    """

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
            words = self._pool.words[part]
            return words[torch.tensor(blocks, device=words.device)].cpu().numpy().view(np.uint8)


def call(engine: AsyncEngine, function: Callable[[Engine], T]) -> asyncio.Future[T]:
    """Call ``function`` on the engine's thread between two steps; an exception that it raises ends the engine.

    Calls are made in the order of submission.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if not future.done():
            future.set_result(result)

    engine.post(lambda inner: loop.call_soon_threadsafe(settle, function(inner)))
    return future


class SourceEnd:
    """One migration at the source: the instance that has the request.

    Args:
        engine: Of the instance.
        store: The blocks that other instances may read.
        request: The request, as it was submitted to the engine.
    """

    def __init__(self, engine: AsyncEngine, store: HeldKvStore, request: Request) -> None:
        self._engine, self._store = engine, store
        self._outgoing = Outgoing(engine.engine.loop, request)

    def hold(self, num_copied: int) -> asyncio.Future[Sequence[BlockId] | None]:
        """Hold the sealed blocks. Those after ``num_copied``; None if the request does not run."""
        return call(self._engine, partial(self._hold, num_copied))

    def stop(self, num_copied: int) -> asyncio.Future[tuple[Stopped, Sequence[BlockId]] | None]:
        """End the request and hold all its blocks. Those after ``num_copied``; None if it does not run."""
        return call(self._engine, partial(self._stop, num_copied))

    def adopt(self, engine: Engine, seq_id: SeqId) -> None:
        """Resume the request here from its blocks. Called on the engine's thread."""
        self._store.release(self._outgoing.blocks)
        self._outgoing.adopt(seq_id, engine.clock())

    def release(self) -> None:
        """Free the held blocks: nothing more is copied. Safe to call twice."""
        self._engine.post(lambda _: self._release())

    def _hold(self, num_copied: int, _: Engine) -> Sequence[BlockId] | None:
        before = self._outgoing.blocks
        is_running = self._outgoing.hold_sealed()
        self._change(before)
        return self._outgoing.blocks[num_copied:] if is_running else None

    def _stop(self, num_copied: int, engine: Engine) -> tuple[Stopped, Sequence[BlockId]] | None:
        before, stopped = self._outgoing.blocks, self._outgoing.stop(num_copied)
        self._change(before)
        if stopped is None:
            return None
        engine.finish(stopped.seq_id, FinishReason.ABORT)
        return stopped, self._outgoing.blocks[num_copied:]

    def _change(self, before: Sequence[BlockId]) -> None:
        self._store.hold(self._outgoing.blocks)
        self._store.release(before)

    def _release(self) -> None:
        self._store.release(self._outgoing.blocks)
        self._outgoing.release()


class TargetEnd:
    """One migration at the target: the instance that is to resume the request.

    Args:
        engine: Of the instance.
        pool: The instance's KV pool.
        secret: The secret that the source admits.
    """

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
        one = RequestCopy(0, tuple(sources), tuple(targets), {address: range(self._pool.layout.num_layers)})
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
