"""The two ends of a migration in an instance: the source lets its blocks be read, the target copies them.

What happens to blocks happens on the engine's thread, in the order of the front's messages.
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

from floodplain.cluster.bulk_stores import NotServed
from floodplain.cluster.kv_copies import Puller, RequestCopy, write_pool
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.shell import Engine
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.migration import Incoming, Outgoing, Stopped

T = TypeVar("T")


class HeldKvStore:
    """KV of blocks that are held for migrations; see ``bulk_stores.Store``. Part: a layer; indices: blocks.

    Args:
        pool: That has them.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    def hold(self, blocks: Iterable[int]) -> None:
        """Let these be read, once more each."""
        with self._lock:
            self._held.update(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Undo a ``hold``."""
        with self._lock:
            self._held -= Counter(blocks)

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """See ``Store``. Blocks are not released, and so not used again, while they are read."""
        blocks = indices.tolist()
        with self._lock:
            if not all(block in self._held for block in blocks):
                raise NotServed("blocks are not held for a migration")
            words = self._pool.words[part]
            return words[torch.tensor(blocks, device=words.device)].cpu().numpy().view(np.uint8)


def call(engine: AsyncEngine, function: Callable[[Engine], T]) -> asyncio.Future[T]:
    """Have ``function`` called on the engine's thread between two steps; what it raises ends the engine.

    Calls are made in the order in which they were asked for.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if not future.done():
            future.set_result(result)

    engine.post(lambda inner: loop.call_soon_threadsafe(settle, function(inner)))
    return future


class SourceEnd:
    """See the module. Of one migration, at the instance that has the request.

    Args:
        engine: Of the instance.
        store: What others may read.
        request: As it was given to the engine.
    """

    def __init__(self, engine: AsyncEngine, store: HeldKvStore, request: Request) -> None:
        self._engine, self._store = engine, store
        self._outgoing = Outgoing(engine.engine.loop, request)

    def hold(self, num_copied: int) -> asyncio.Future[Sequence[BlockId] | None]:
        """Hold sealed blocks; those behind ``num_copied``, or None if the request does not run."""
        return call(self._engine, partial(self._hold, num_copied))

    def stop(self, num_copied: int) -> asyncio.Future[tuple[Stopped, Sequence[BlockId]] | None]:
        """End the request and hold all of its blocks; those behind ``num_copied``. None if it does not run."""
        return call(self._engine, partial(self._stop, num_copied))

    def adopt(self, engine: Engine, seq_id: SeqId) -> None:
        """The request is here again; on the engine's thread."""
        self._store.release(self._outgoing.blocks)
        self._outgoing.adopt(seq_id, engine.clock())

    def release(self) -> None:
        """Nothing is to be copied any more. Safe to call twice."""
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
    """See the module. Of one migration, at the instance that is to go on with the request.

    Args:
        engine: Of the instance.
        pool: Its KV.
        secret: That the source admits.
    """

    def __init__(self, engine: AsyncEngine, pool: KVPool, secret: bytes) -> None:
        self._engine, self._pool = engine, pool
        self._incoming = Incoming(engine.engine.loop)
        self._puller = Puller(secret)
        self._copying: asyncio.Future[bool] | None = None
        self._is_closed = False

    def pull(self, address: str, sources: Sequence[int]) -> Coroutine[Any, Any, bool]:
        """Copy blocks of all layers; whether all are here, proven whole."""
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
        """The request is here; on the engine's thread."""
        self._incoming.adopt(seq_id, num_computed, engine.clock())

    async def close(self) -> None:
        """Hang up, end a copy, and free what was not adopted. Safe to call twice."""
        self._is_closed = True
        self._puller.close()
        if self._copying is not None:
            await asyncio.gather(self._copying, return_exceptions=True)
        self._engine.post(lambda _: self._incoming.release())
