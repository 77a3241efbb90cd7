"""A load target over an engine in this process, with the interface of one over HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from floodplain.core.errors import UserError
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.async_engine import AsyncEngine
from floodplain.observe.polling import polling
from floodplain.observe.timeline import Timeline, TimelineSample
from floodplain.workload.records import LoadRequest, RequestFailed, TokenChunk


class EngineTarget:
    """A ``LoadTarget`` over an ``AsyncEngine``: greedy, token by token."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Submit ``request`` now and yield its tokens as steps complete. Raises RequestFailed if it is refused."""
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        asked = Request(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            params=params,
            arrival_s=time.monotonic(),
        )
        deltas = self._engine.generate(asked)
        try:
            async with aclosing(deltas) as answer:
                async for delta in answer:
                    yield TokenChunk(time.monotonic(), delta.text, delta.token_ids)
        except UserError as error:
            raise RequestFailed(str(error)) from error


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    """Start an engine, and close it when the context ends."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def sampled_timeline(engine: AsyncEngine, interval_s: float = 0.25) -> AsyncIterator[Timeline]:
    """Record running, waiting and KV use of ``engine`` every ``interval_s`` seconds while the context is open."""
    timeline = Timeline()

    async def sample() -> None:
        stats = engine.stats()
        timeline.record(
            TimelineSample(
                time_s=time.monotonic(),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_swapped=stats.num_swapped,
                kv_used_blocks=stats.num_used_blocks,
                kv_total_blocks=stats.num_blocks,
            )
        )

    async with polling(sample, interval_s):
        yield timeline
