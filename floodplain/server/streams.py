"""The output streams of one HTTP request: merged, gathered, counted, cancelled if the client disconnects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from starlette.types import Receive

from floodplain.core.plan import TokenLogprobs
from floodplain.engine.outputs import OutputDelta
from floodplain.server.responses import PromptTokensDetails, Usage
from floodplain.web.errors import ApiError

T = TypeVar("T")
Deltas = AsyncGenerator[OutputDelta, None]
IndexedDeltas = AsyncGenerator[tuple[int, OutputDelta], None]


class Tally:
    """Counts the tokens of one HTTP request.

    Args:
        prompt_lengths: Tokens of each prompt.
    """

    def __init__(self, *prompt_lengths: int) -> None:
        self._prompt_lengths = prompt_lengths
        self._output_lengths: Counter[int] = Counter()
        self._cached_lengths: dict[int, int] = {}

    def add(self, index: int, delta: OutputDelta) -> None:
        """Count a delta of prompt ``index``; the first one has the number of cached prompt tokens."""
        self._output_lengths[index] += len(delta.token_ids)
        self._cached_lengths.setdefault(index, delta.num_cached_tokens)

    def usage(self) -> Usage:
        """The counts of all prompts."""
        cached = sum(self._cached_lengths.values())
        return _usage(sum(self._prompt_lengths), self._output_lengths.total(), cached)

    def usage_of(self, index: int) -> Usage:
        """The counts of one prompt so far."""
        return _usage(self._prompt_lengths[index], self._output_lengths[index], self._cached_lengths.get(index, 0))


def _usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


async def merge(streams: Sequence[Deltas]) -> IndexedDeltas:
    """The deltas of all streams as they arrive, with the index of their stream. Closing it closes all streams.

    Raises:
        ApiError: A request was aborted because the server stops (503).
    """
    source = _only(streams[0]) if len(streams) == 1 else _interleave(streams)
    async with aclosing(source):
        async for index, delta in source:
            if delta.finish_reason == "abort":
                raise ApiError(503, "the server stopped before the request ended", code="aborted")
            yield index, delta


async def _only(stream: Deltas) -> IndexedDeltas:
    async with aclosing(stream):
        async for delta in stream:
            yield 0, delta


async def _interleave(streams: Sequence[Deltas]) -> IndexedDeltas:
    ready: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: Deltas) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    ready.put_nowait((index, delta))
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_live = len(pumps)
    try:
        while num_live:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_live -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def gather(stream: IndexedDeltas, num_prompts: int, tally: Tally) -> list[OutputDelta]:
    """Run the stream to its end, and join the deltas of each prompt into one."""
    parts: list[list[OutputDelta]] = [[] for _ in range(num_prompts)]
    async with aclosing(stream):
        async for index, delta in stream:
            tally.add(index, delta)
            parts[index].append(delta)
    return [_join(deltas) for deltas in parts]


def _join(deltas: list[OutputDelta]) -> OutputDelta:
    logprobs: tuple[TokenLogprobs, ...] = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=None if deltas[0].logprobs is None else logprobs,
    )


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None if the client disconnects first, which cancels ``work`` at once.

    The body of the request must have been read before, so that ``receive`` returns the disconnect next.
    """
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((task, hang_up), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
