"""A running OpenAI server, as a target to profile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from floodplain.core.errors import UserError
from floodplain.observe.scraped import Scraped
from floodplain.profiler.kv_use import KvUse
from floodplain.profiler.measured import Opened
from floodplain.profiler.server_kv import VllmBlocks, kv_use_of
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptTokenizer

if TYPE_CHECKING:
    import aiohttp

LOOK_S = 0.25
_TIMEOUT_S = 10.0
"""Of one look at the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server is.

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
async def open_server(server: ServerAddress, tokenizer: PromptTokenizer, vllm: VllmBlocks) -> AsyncIterator[Opened]:
    """A server that answers, and whose metrics say how much KV is in use.

    Raises:
        UserError: There is none, or its metrics do not say.
    """
    import aiohttp

    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else None
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    target = HttpTarget(server.base_url, server.model, api_key=server.api_key)
    async with target, aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def read() -> KvUse:
            try:
                return kv_use_of(await _scrape(session, server.root), vllm)
            except UserError as error:
                raise UserError(f"{server.root}: {error}") from None

        await read()
        yield Opened(
            name=server.root, machine=server.root, tokenizer=tokenizer, target=target, read=read, look_s=LOOK_S
        )


async def _scrape(session: aiohttp.ClientSession, root: str) -> Scraped:
    import aiohttp

    try:
        async with session.get(f"{root}/metrics") as response:
            text = await response.text(errors="replace")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"no server answers there: {reason}") from None
    if response.status != 200:
        raise UserError(f"its /metrics answer with HTTP {response.status}")
    try:
        return Scraped(text)
    except (ValueError, KeyError):
        raise UserError("its /metrics are no metrics for Prometheus") from None
