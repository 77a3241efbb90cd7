"""The output streams of one HTTP request: merged, gathered, counted, cancelled if the client disconnects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from floodplain.core.plan import PromptLogprobs, TokenLogprobs
from floodplain.engine.outputs import ERROR, OutputDelta
from floodplain.server.responses import PromptTokensDetails, Usage
from floodplain.web.errors import ApiError
from floodplain.web.events import HEADERS

T = TypeVar("T")
Deltas = AsyncGenerator[OutputDelta, None]
IndexedDeltas = AsyncGenerator[tuple[int, OutputDelta], None]


class Tally:
    """Counts the tokens of one HTTP request, from the lengths of its prompts on, which have ``num_choices`` each."""

    def __init__(self, *prompt_lengths: int, num_choices: int = 1) -> None:
        self._prompt_lengths = prompt_lengths
        self._num_choices = num_choices
        self._output_lengths: Counter[int] = Counter()
        self._cached_lengths: dict[int, int] = {}

    def add(self, index: int, delta: OutputDelta) -> None:
        """Count a delta of choice ``index``; a prompt's first one has the number of cached prompt tokens."""
        self._output_lengths[index] += len(delta.token_ids)
        self._cached_lengths.setdefault(index // self._num_choices, delta.num_cached_tokens)

    def usage(self) -> Usage:
        """The counts of all prompts."""
        cached = sum(self._cached_lengths.values())
        return _usage(sum(self._prompt_lengths), self._output_lengths.total(), cached)

    def usage_of(self, index: int) -> Usage:
        """The counts of one choice so far, and of its prompt."""
        prompt = index // self._num_choices
        return _usage(self._prompt_lengths[prompt], self._output_lengths[index], self._cached_lengths.get(prompt, 0))


def _usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


def share_prompt(streams: Sequence[Deltas]) -> list[Deltas]:
    """The streams of one prompt's choices: all but the first begin with its first delta, and so find its blocks.

    The first choice computes the prompt's log-probabilities; the first delta of each choice has them.
    """
    prompt = _Prompt()
    return [_computing(streams[0], prompt), *(_after(prompt, stream) for stream in streams[1:])]


@dataclass(slots=True)
class _Prompt:
    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    logprobs: PromptLogprobs | None = None


async def _computing(stream: Deltas, prompt: _Prompt) -> Deltas:
    try:
        async with aclosing(stream):
            async for delta in stream:
                if not prompt.is_computed.is_set():
                    prompt.logprobs = delta.prompt_logprobs
                    prompt.is_computed.set()
                yield delta
    finally:
        prompt.is_computed.set()


async def _after(prompt: _Prompt, stream: Deltas) -> Deltas:
    async with aclosing(stream):
        await prompt.is_computed.wait()
        logprobs = prompt.logprobs
        async for delta in stream:
            yield delta if logprobs is None else replace(delta, prompt_logprobs=logprobs)
            logprobs = None


async def merge(streams: Sequence[Deltas]) -> IndexedDeltas:
    """The deltas of all streams, with the stream's index; closing closes all. ApiError 503 at a stop, 500 for NaN."""
    source = _only(streams[0]) if len(streams) == 1 else _interleave(streams)
    async with aclosing(source):
        async for index, delta in source:
            if delta.finish_reason == "abort":
                raise ApiError(503, "the server stopped before the request ended", code="aborted")
            if delta.finish_reason == ERROR:
                why = "the model computed NaN or infinity: its server may need another --dtype (float32, bfloat16)"
                raise ApiError(500, why, code="not_finite")
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


async def gather(stream: IndexedDeltas, num_choices: int, tally: Tally) -> list[OutputDelta]:
    """Run the stream to its end, and join the deltas of each choice into one."""
    parts: list[list[OutputDelta]] = [[] for _ in range(num_choices)]
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
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None if the client disconnects, which cancels it. The body must have been read before."""
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


PING = b": ping\n\n"
"""A comment, which clients skip. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""


class Acceptance:
    """Tracks whether an engine has accepted all parts of one HTTP request."""

    def __init__(self, num_requests: int) -> None:
        self._num_left = num_requests
        self.is_whole = asyncio.Event()

    def note(self) -> None:
        """Note that one more part was accepted."""
        self._num_left -= 1
        if self._num_left == 0:
            self.is_whole.set()


class EventStream(StreamingResponse):
    """Server-sent events whose head is sent once the request is ``accepted``, after ``ping_s`` at the latest.

    They keep proxies from cutting a silent connection. A failure of ``events`` before the head is raised, so that it
    sets the status; later ``describe`` makes the last events of it. ``events`` is closed in every case. A comment is
    sent after ``ping_s`` seconds of silence; 0: never.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        accepted: asyncio.Event,
        ping_s: float,
        describe: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._events, self._accepted, self._ping_s, self._describe = events, accepted, ping_s, describe
        self._opening = asyncio.Lock()
        self._has_begun = False
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; stop at once when the client disconnects."""
        await unless_hung_up(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        waiting = asyncio.create_task(self._bridge_silences(send))
        try:
            last = await self._send_events(send)
        finally:
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all events; return the bytes that end the stream: none, or the error events after a failure."""
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._begin(send)
                    await self._send(send, event)
            await self._begin(send)
        except Exception as error:
            async with self._opening:
                if not self._has_begun:
                    raise
            return self._describe(error)
        return b""

    async def _bridge_silences(self, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ping_s or None):
                await self._accepted.wait()
        await self._begin(send)
        while self._ping_s:
            silent_s = asyncio.get_running_loop().time() - self._sent_s
            if silent_s < self._ping_s:
                await asyncio.sleep(self._ping_s - silent_s)
            else:
                await self._send(send, PING)

    async def _begin(self, send: Send) -> None:
        """Send the head if it is not sent yet: from then on the status is 200."""
        if self._has_begun:
            return
        async with self._opening:
            if not self._has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._note_sent()
                self._has_begun = True

    async def _send(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._note_sent()

    def _note_sent(self) -> None:
        self._sent_s = asyncio.get_running_loop().time()
