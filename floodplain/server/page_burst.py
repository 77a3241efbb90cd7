"""Bursts of requests from the page's button: for servers that only this machine reaches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing, suppress
from random import Random

from fastapi import APIRouter, Request
from pydantic import Field

from floodplain.core.errors import UserError
from floodplain.core.request import Request as EngineRequest
from floodplain.core.sampling import SamplingParams
from floodplain.server.auth import Client
from floodplain.server.counts import RequestCounts
from floodplain.server.protocol import ServingEngine
from floodplain.web.bodies import BoundedModel, JsonRoute
from floodplain.web.errors import ApiError
from floodplain.web.gate import CLIENT_SCOPE_KEY
from floodplain.web.origin import LOOPBACK_ONLY, expect_json, expect_own_names

NUM_REQUESTS = 48
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 256), (32, 256)
"""Least and most tokens of a request of a burst; a model with a shorter context gets at most a half of it each."""
MOST_TOKEN_IDS = 256
"""Prompts are of the first ids, which every tokenizer has: a model's vocabulary may be padded."""


class BurstBody(BoundedModel):
    """How many requests to send."""

    requests: int = Field(NUM_REQUESTS, ge=1, le=256)


class Bursts:
    """Sends bursts to an engine, one at a time. Their tokens are random, and their answers are dropped."""

    def __init__(self, engine: ServingEngine, counts: RequestCounts) -> None:
        self._engine, self._counts = engine, counts
        self._running: set[asyncio.Task[None]] = set()
        self._random = Random(0)

    def routes(self) -> APIRouter:
        """The route that starts a burst. Refuses pages of other origins, by ``Host``, ``Origin`` and content type."""
        routes = APIRouter(route_class=JsonRoute, include_in_schema=False)

        @routes.post("/live/burst")
        async def burst(body: BurstBody, request: Request) -> BurstBody:
            expect_own_names(request.scope, LOOPBACK_ONLY)
            expect_json(request.scope)
            self.begin(body.requests, request.scope.get(CLIENT_SCOPE_KEY, Client()))
            return body

        return routes

    def begin(self, num_requests: int, client: Client) -> None:
        """Send that many requests at once. Raises ApiError 409 while an earlier burst runs."""
        if self._running:
            raise ApiError(409, "a burst runs already: wait until its requests have ended", code="burst_runs")
        for request in self._make(num_requests, client):
            task = asyncio.get_running_loop().create_task(self._serve(request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _make(self, num_requests: int, client: Client) -> Iterator[EngineRequest]:
        half, name, now = self._engine.max_model_len // 2, uuid.uuid4().hex[:8], time.monotonic()
        num_ids = min(self._engine.vocab_size, MOST_TOKEN_IDS)
        for number in range(num_requests):
            num_prompt, num_output = (
                self._random.randint(min(least, half), min(most, half))
                for least, most in (PROMPT_TOKENS, OUTPUT_TOKENS)
            )
            yield EngineRequest(
                request_id=f"burst-{name}-{number}",
                prompt_token_ids=tuple(self._random.randrange(num_ids) for _ in range(num_prompt)),
                params=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
                arrival_s=now,
                priority=client.priority(None),
                client=client.name,
            )

    async def _serve(self, request: EngineRequest) -> None:
        with suppress(UserError, RuntimeError):  # refused, or the server stops: the page shows which were served
            async with aclosing(self._counts.watch(self._engine.generate(request))) as deltas:
                async for _ in deltas:
                    pass
