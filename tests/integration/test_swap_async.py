"""The async engine over swap space: stalls do not keep newcomers waiting, and replays report what moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from floodplain.bench.offline import OfflineRun, run_offline
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Tier
from floodplain.engine import shell
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.memory.swap_space import SwapSpace
from floodplain.policy.base import Policy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.workload.records import LoadRequest
from tests.support.cluster_peers import until
from tests.support.faulty_transfer import HeldTransferEngine
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy, SwapOncePolicy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow

PROMPTS = [tuple(range(first, first + 30 + first)) for first in range(3, 15)]


@asynccontextmanager
async def running(policy: Policy, **flags: Any) -> AsyncIterator[AsyncEngine]:
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": 24 * BLOCK_BYTES, "max_model_len": 128, "swap": "host"}
    engine = AsyncEngine.from_config(EngineConfig(model="dummy:tiny-llama", **(options | flags)))
    engine.engine.loop.policy = policy
    await engine.start()
    try:
        async with asyncio.timeout(HANG_S):  # a bug must not hang the suite
            yield engine
    finally:
        await engine.close()


def space_of(engine: AsyncEngine) -> SwapSpace:
    return cast(SwapSpace, cast(Any, engine.engine._executor)._swap)


def hold_copies(engine: AsyncEngine) -> HeldTransferEngine:
    """Hold all copies until the test releases them."""
    tiers = space_of(engine)._tiers
    held = tiers[Tier.HOST] = HeldTransferEngine(tiers[Tier.HOST])
    return held


async def generate(engine: AsyncEngine, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
    return [token async for delta in engine.generate(request) for token in delta.token_ids]


async def test_a_newcomer_ends_the_wait_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits last minutes here, and the copy ends after the newcomer: only its arrival can start it sooner."""
    monkeypatch.setattr(shell, "MAX_WAIT_S", 2 * HANG_S)
    async with running(FcfsPolicy()) as engine:
        undisturbed = await generate(engine, PROMPTS[1], 6)
        engine.engine.loop.policy = SwapOncePolicy(victim=1)
        copies = hold_copies(engine)
        swapped = asyncio.create_task(generate(engine, PROMPTS[0], 20))
        await until(lambda: engine.stats().num_swapped and space_of(engine).num_in_flight)
        assert await generate(engine, PROMPTS[1], 6) == undisturbed
        assert engine.stats().num_swapped == space_of(engine).num_in_flight == 1
        copies.release()
        assert len(await swapped) == 20
        stats = engine.stats()
        assert stats.preemptions["swap"] == 1
        assert stats.swap_stall_s > 0
        assert stats.num_used_blocks == stats.kv_bytes["host"] == 0


async def test_a_stalled_engine_is_closed_at_once_by_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that it waits for never ends."""
    monkeypatch.setattr(shell, "MAX_WAIT_S", 2 * HANG_S)
    async with running(SwapOncePolicy()) as engine:
        hold_copies(engine)
        lost = asyncio.create_task(generate(engine, PROMPTS[0], 20))
        await until(lambda: space_of(engine).num_in_flight)
        await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await lost


def test_a_replay_reports_what_its_swaps_moved() -> None:
    requests = [
        LoadRequest(request_id=str(i), arrival_s=0.002 * i, prompt=None, prompt_token_ids=prompt, max_tokens=12,
                    ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip

    async def replay(policy: Policy) -> OfflineRun:
        async with running(policy, hardware="emulated-pcie4") as engine:
            await run_offline(engine, requests[:3], progress=False)  # earlier traffic does not count
            before = engine.stats()
            run = await run_offline(engine, requests, progress=False)
            after = engine.stats()
        swap, host = run.report.swap, run.report.swap.by_tier["host"]
        assert host.out_bytes == after.swap_bytes["out", "host"] - before.swap_bytes["out", "host"] > 0
        assert host.in_bytes == swap.in_bytes > 0
        assert swap.out_bytes + swap.backup_bytes == host.out_bytes
        assert 0 < swap.stall_s < max(run.timeline["time_s"]) + 1
        assert not any(swap.failed_transfers.values())
        assert run.report.preemptions > 0
        return run

    run = asyncio.run(replay(ImpatientPolicy()))
    assert all(record.error is None and len(record.token_times_s) == 12 for record in run.records)
