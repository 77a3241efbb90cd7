"""Engines that have nothing to compute hear of recalls at once, and give back what they borrowed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from floodplain.engine import shell
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.lending import peer_parts
from floodplain.lending.peer_tier import PeerTier
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support.lending import Neighbour, coordinating
from tests.support.swapping import BLOCK_BYTES

pytestmark = pytest.mark.slow

NUM_PAGES = 4
NEVER_S = 3600.0
FLAGS = {
    "dtype": "float32", "max_model_len": 128, "kv_memory": 24 * BLOCK_BYTES, "swap": "peer",
    "swap_memory": 48 * BLOCK_BYTES, "peer_memory": NUM_PAGES * PAGE_BYTES,
}  # fmt: skip


@contextmanager
def neighbourhood(patch: pytest.MonkeyPatch) -> Iterator[tuple[Neighbour, EngineConfig]]:
    """A neighbour that lends all that it has, and recalls without haste; and who may borrow of it."""
    patch.setattr(peer_parts, "CHUNK_BYTES", PAGE_BYTES)
    with coordinating() as url, closing(Neighbour(url, NUM_PAGES, NEVER_S)) as neighbour:
        neighbour.lend(NUM_PAGES)
        config = EngineConfig(model="dummy:tiny-llama", coordinator=url, device_name=f"idle-{os.getpid()}", **FLAGS)  # type: ignore[arg-type]
        yield neighbour, config


async def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        await asyncio.sleep(1e-3)


def test_an_idle_server_needs_no_step_of_its_own_to_hear_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "IDLE_S", NEVER_S)

    async def story(neighbour: Neighbour, engine: AsyncEngine) -> None:
        await engine.start()
        try:
            await until(lambda: neighbour.taken_pages == NUM_PAGES)
            neighbour.lend(0)
            await until(lambda: not neighbour.taken_pages)
            assert tier_of(engine).totals.num_returned == NUM_PAGES
        finally:
            await engine.close()

    with neighbourhood(monkeypatch) as (neighbour, config):
        asyncio.run(story(neighbour, AsyncEngine.from_config(config)))


def tier_of(engine: AsyncEngine) -> PeerTier:
    neighbours = engine.engine.neighbours
    assert neighbours is not None and neighbours.peer_tier is not None
    return neighbours.peer_tier
