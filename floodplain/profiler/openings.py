"""Opens a target to profile: an engine in this process, or a running OpenAI server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from floodplain.bench.engine_target import EngineTarget, started
from floodplain.bench.offline import hardware_report
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.observe.scraped import Scraped
from floodplain.profiler.kv_use import KvUse, VllmBlocks, kv_use_of
from floodplain.profiler.measured import Opened
from floodplain.web.client import AnswerLimits, HttpClient, NoAnswer
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptTokenizer

ENGINE_LOOK_S, SERVER_LOOK_S = 0.1, 0.25
"""Seconds from one poll of the KV in use to the next."""
LIMITS = AnswerLimits(max_bytes=2**21)
"""Limits of one read of the metrics. Those of a large vLLM have 300 kB."""


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Opened]:
    """Start an engine, and close it when the context ends. Raises UserError if a flag or a file is bad."""
    # All requests are queued: none is refused because of the queue's length.
    engine = AsyncEngine.from_config(replace(config, max_waiting=sys.maxsize))

    async def read() -> KvUse:
        return _use_of(engine.stats())

    async with started(engine):
        yield Opened(
            name=engine.model_name,
            machine=hardware_report(config.device, engine.engine.links).name,
            tokenizer=engine.tokenizer,
            target=EngineTarget(engine),
            read=read,
            look_s=ENGINE_LOOK_S,
        )


def _use_of(stats: EngineStats) -> KvUse:
    pool_bytes = stats.kv_bytes["local"]
    return KvUse(
        used_bytes=pool_bytes * stats.num_used_blocks // max(1, stats.num_blocks),
        pool_bytes=pool_bytes,
        num_live=stats.num_running + stats.num_waiting + stats.num_swapped,
    )


@asynccontextmanager
async def open_server(
    target: HttpTarget, client: HttpClient, tokenizer: PromptTokenizer, vllm: VllmBlocks
) -> AsyncIterator[Opened]:
    """Open a server that answers, and whose metrics state how much KV is in use; else raises UserError.

    ``client`` has the address without a path of the API, for the metrics; ``vllm`` is what those of vLLM do not state.
    """

    async def read() -> KvUse:
        try:
            return kv_use_of(await _scrape(client), vllm)
        except UserError as error:
            raise UserError(f"{client.url}: {error}") from None

    await read()
    yield Opened(
        name=client.url, machine=client.url, tokenizer=tokenizer, target=target, read=read, look_s=SERVER_LOOK_S
    )


async def _scrape(client: HttpClient) -> Scraped:
    try:
        answer = await client.ask("/metrics", limits=LIMITS)
    except NoAnswer as error:
        raise UserError(f"its /metrics do not answer: {error}") from None
    if answer.status != 200:
        raise UserError(f"its /metrics answer with HTTP {answer.status}")
    return Scraped(answer.text)
