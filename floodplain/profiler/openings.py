"""Opens a target to profile: an engine in this process, or a running OpenAI server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from floodplain.bench.engine_target import EngineTarget
from floodplain.bench.offline import hardware_report
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.observe.scraped import Scraped
from floodplain.profiler.kv_use import KvUse, VllmBlocks, kv_use_of
from floodplain.profiler.measured import Opened
from floodplain.web.client import AnswerLimits, HttpClient
from floodplain.web.exchange import NoAnswer
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompt_form import PromptForm
from floodplain.workload.prompts import PromptTokenizer

ENGINE_LOOK_S, SERVER_LOOK_S = 0.1, 0.25
"""Seconds from one poll of the KV in use to the next."""
LIMITS = AnswerLimits(max_bytes=2**21)
"""Limits of one read of the metrics. Those of a large vLLM have 300 kB."""


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Opened]:
    """Start an engine, and close it when the context ends.

    Raises:
        UserError: A flag or a file is bad.
    """
    # All requests are queued: none is refused because of the queue's length.
    engine = AsyncEngine.from_config(replace(config, max_waiting=sys.maxsize))

    async def read() -> KvUse:
        return _use_of(engine.stats())

    await engine.start()
    try:
        yield Opened(
            name=engine.model_name,
            machine=hardware_report(config.device, engine.engine.links).name,
            tokenizer=engine.tokenizer,
            target=EngineTarget(engine),
            read=read,
            look_s=ENGINE_LOOK_S,
        )
    finally:
        await engine.close()


def _use_of(stats: EngineStats) -> KvUse:
    pool_bytes = stats.kv_bytes["local"]
    return KvUse(
        used_bytes=pool_bytes * stats.num_used_blocks // max(1, stats.num_blocks),
        pool_bytes=pool_bytes,
        num_live=stats.num_running + stats.num_waiting + stats.num_swapped,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a server, and how to use it.

    Attributes:
        base_url: As for ``HttpTarget``.
        model: The name under which it serves the model.
        api_key: Sent as a bearer token; None sends none.
    """

    base_url: str
    model: str
    api_key: str | None = None

    @property
    def root(self) -> str:
        """The address without a path of the API."""
        return self.base_url.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def open_server(
    server: ServerAddress, tokenizer: PromptTokenizer, vllm: VllmBlocks, prompts: PromptForm
) -> AsyncIterator[Opened]:
    """Open a server that answers, and whose metrics state how much KV is in use.

    Raises:
        UserError: There is none, or its metrics do not state it.
    """
    target = HttpTarget(server.base_url, server.model, api_key=server.api_key, prompts=prompts)
    client = HttpClient(server.root, server.api_key)

    async def read() -> KvUse:
        try:
            return kv_use_of(await _scrape(client), vllm)
        except UserError as error:
            raise UserError(f"{server.root}: {error}") from None

    await read()
    yield Opened(
        name=server.root, machine=server.root, tokenizer=tokenizer, target=target, read=read, look_s=SERVER_LOOK_S
    )


async def _scrape(client: HttpClient) -> Scraped:
    try:
        answer = await client.ask("/metrics", limits=LIMITS)
    except NoAnswer as error:
        raise UserError(f"its /metrics do not answer: {error}") from None
    if answer.status != 200:
        raise UserError(f"its /metrics answer with HTTP {answer.status}")
    return Scraped(answer.text)
