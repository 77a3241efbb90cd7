"""Endless streams of the ``openai`` client, with known tokens."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import openai
import torch

from floodplain.model import sampler
from tests.support import router_process

MAX_TOKENS = 240
SILENCE_S = 60.0
"""A stream without a token for this long hangs."""
HOW: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 11})
"""Greedy and seeded."""
NUM_EACH = 6
ROUNDING = 1e-6
"""The most by which probabilities in float32 may differ between two orders of summation; ten times what was seen."""


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and the tokens that one engine generates for it."""

    prompt: list[int]
    how: dict[str, Any]
    tokens: list[int]


def known_requests(model: str, flags: dict[str, Any], seed: int) -> list[Known]:
    """Return twelve requests, and their tokens from an undisturbed engine.

    Products of matrices sum in another order when batches have other sizes, so a prompt is left out if rounding could
    decide one of its tokens.
    """
    random, found = Random(seed), []
    for how in HOW:
        while sum(one.how == how for one in found) < NUM_EACH:
            prompt = [random.randrange(256) for _ in range(random.randrange(20, 160))]
            with least_margin() as margin:
                (tokens,) = router_process.one_engine(model, [prompt], flags, max_tokens=MAX_TOKENS, **how)
            if margin() >= ROUNDING:
                found.append(Known(prompt, how, tokens))
    random.shuffle(found)
    return found


@contextmanager
def least_margin() -> Iterator[Callable[[], float]]:
    """Yield a function: the least difference of probability that decided a random draw meanwhile; inf without one."""
    least, invert = [math.inf], sampler._invert

    def recording(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        cumulative = probabilities.double().cumsum(-1)
        least.append(float((cumulative / cumulative[:, -1:] - uniforms[:, None]).abs().min()))
        return invert(probabilities, uniforms)

    with patch.object(sampler, "_invert", recording):
        yield lambda: min(least)


class Load:
    """Repeats the known requests on its own event loop. ``start`` it, and ``close`` it.

    ``num_tokens`` are those of each stream, over all of its requests; ``num_checked`` counts requests with the tokens
    of one engine, ``num_hung_up`` those that their client aborted, and ``wrong`` has the problems of others.
    """

    def __init__(self, url: str, model: str, known: Sequence[Known], num_streams: int) -> None:
        self.num_tokens = [0] * num_streams
        self.num_checked = self.num_hung_up = 0
        self.wrong: list[str] = []
        self._url, self._model, self._known = url, model, known
        self._tasks: list[asyncio.Task[None] | None] = [None] * num_streams
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Abort every stream and stop. Safe to call twice."""
        if self._is_over:
            return
        self._is_over = True
        if self._thread.ident is not None:
            self.hang_up(range(len(self._tasks)))
            self._thread.join()
        self._loop.close()

    def hang_up(self, streams: Sequence[int]) -> int:
        """Close and restart these streams; return how many were closed, without those between requests."""
        told: Future[int] = Future()
        self._loop.call_soon_threadsafe(lambda: told.set_result(sum(self._cancel(stream) for stream in streams)))
        return told.result(SILENCE_S)

    def _cancel(self, stream: int) -> bool:
        task = self._tasks[stream]
        return task is not None and task.cancel()

    async def _run(self) -> None:
        limits = openai.DefaultAsyncHttpxClient(timeout=SILENCE_S)
        async with openai.AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key="any", max_retries=0, timeout=SILENCE_S, http_client=limits
        ) as client:
            await asyncio.gather(*[self._go_on(client, stream) for stream in range(len(self._tasks))])

    async def _go_on(self, client: openai.AsyncOpenAI, stream: int) -> None:
        for number in count(stream, len(self._tasks)):
            if self._is_over:
                return
            task = self._tasks[stream] = asyncio.create_task(self._ask(client, stream, number))
            await asyncio.wait([task])
            if task.cancelled():
                self.num_hung_up += not self._is_over
            elif task.exception() is not None:
                self.wrong.append(f"request {number}: {task.exception()!r}")

    async def _ask(self, client: openai.AsyncOpenAI, stream: int, number: int) -> None:
        one, tokens = self._known[number % len(self._known)], list[int]()
        extra = {"ignore_eos": True, "return_token_ids": True}
        chunks = await client.completions.create(
            model=self._model, prompt=one.prompt, stream=True, extra_body=extra, max_tokens=MAX_TOKENS, **one.how
        )
        async for chunk in chunks:
            new = chunk.choices[0].token_ids or []
            tokens += new
            self.num_tokens[stream] += len(new)
        if tokens == one.tokens:
            self.num_checked += 1
            return
        same = next((k for k, (x, y) in enumerate(zip(tokens, one.tokens, strict=False)) if x != y), len(tokens))
        self.wrong.append(f"request {number} ({one.how}) has {len(tokens)} tokens, of which {same} are right")
