"""The longest request of an instance that can drop layers: its pool holds whole quanta of pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from floodplain.cluster.groups.droppable import open_droppable
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig

ONE_QUANTUM = 512
"""Tokens of it, in this model; the memory below holds 656 tokens."""
KV_MEMORY = 1_000_000


def config(max_model_len: int | None, kv_memory: int = KV_MEMORY) -> EngineConfig:
    return EngineConfig(model="dummy:tiny-deep", kv_memory=kv_memory, max_model_len=max_model_len)


@pytest.mark.parametrize(("asked", "got"), [(None, ONE_QUANTUM), (ONE_QUANTUM, ONE_QUANTUM), (64, 64)])
def test_unless_it_is_asked_for_it_is_what_whole_quanta_hold(tmp_path: Path, asked: int | None, got: int) -> None:
    async def limits() -> tuple[int, int]:
        replica = open_droppable(config(asked), tmp_path, "127.0.0.1")
        try:
            await replica.start()
            ledger = replica.engine.engine.loop.state.ledger
            return ledger.num_blocks * ledger.block_tokens, replica.engine.max_model_len
        finally:
            await replica.close()

    assert asyncio.run(limits()) == (ONE_QUANTUM, got)


@pytest.mark.parametrize(("asked", "kv_memory"), [(ONE_QUANTUM + 1, KV_MEMORY), (None, KV_MEMORY // 2)])
def test_what_no_whole_quantum_holds_is_refused(tmp_path: Path, asked: int | None, kv_memory: int) -> None:
    with pytest.raises(UserError, match=r"--kv-memory holds (512|0) tokens in whole quanta of 32 blocks.*: raise it"):
        open_droppable(config(asked, kv_memory), tmp_path, "127.0.0.1")
