"""Opens an engine in this process as a target to profile."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from floodplain.bench.engine_target import EngineTarget
from floodplain.bench.offline import hardware_report
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.profiler.kv_use import KvUse
from floodplain.profiler.measured import Opened

LOOK_S = 0.1


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Opened]:
    """Start an engine, and close it when the context ends.

    Raises:
        UserError: A flag or a file is bad.
    """
    # All requests are queued: none is refused because of the queue's length.
    engine = AsyncEngine.from_config(replace(config, max_waiting=sys.maxsize))

    async def read() -> KvUse:
        return use_of(engine.stats())

    await engine.start()
    try:
        yield Opened(
            name=engine.model_name,
            machine=hardware_report(config.device, engine.engine.links).name,
            tokenizer=engine.tokenizer,
            target=EngineTarget(engine),
            read=read,
            look_s=LOOK_S,
        )
    finally:
        await engine.close()


def use_of(stats: EngineStats) -> KvUse:
    """Return the KV use that an engine's statistics state."""
    pool_bytes = stats.kv_bytes["local"]
    return KvUse(
        used_bytes=pool_bytes * stats.num_used_blocks // max(1, stats.num_blocks),
        pool_bytes=pool_bytes,
        num_live=stats.num_running + stats.num_waiting + stats.num_swapped,
    )
