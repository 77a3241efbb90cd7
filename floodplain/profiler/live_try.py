"""Runs a try, and ends it as soon as its goals are out of reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from floodplain.core.errors import UserError
from floodplain.profiler.goals import Answer, TryGoals
from floodplain.workload.client import run_load
from floodplain.workload.records import LoadRequest, LoadTarget, RequestFailed, RequestRecord, TokenChunk

LOOK_S = 0.1
"""The interval of checks whether the goals are out of reach."""


@dataclass(slots=True)
class _Live:
    """One request under way."""

    sent_s: float
    max_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    is_over: bool = False
    is_whole: bool = False

    def answer(self, now_s: float) -> Answer:
        return Answer(
            sent_s=self.sent_s,
            token_times_s=self.token_times_s,
            is_whole=self.is_whole,
            cut_s=None if self.is_over else now_s,
        )


class LiveTry:
    """Counts token by token what is certainly beyond the goals.

    Args:
        goals: Of the try.
        num_requests: All that will be sent.
        max_gaps: The most gaps between tokens that their answers can have.

    Attributes:
        error: Of the first request that failed.
    """

    def __init__(self, goals: TryGoals, num_requests: int, max_gaps: int) -> None:
        self._goals = goals
        self._may_miss = goals.allow(num_requests)
        self._may_be_late = goals.allow(max_gaps)
        self._live: dict[str, _Live] = {}
        self._missed: set[str] = set()
        self._num_late_gaps = 0
        self.error: str | None = None

    def begin(self, request_id: str, max_tokens: int, now_s: float) -> None:
        """Record that a request is sent."""
        self._live[request_id] = _Live(now_s, max_tokens)

    def receive(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """Record that tokens arrive together."""
        one = self._live[request_id]
        limit_s = self._goals.gap_s
        if limit_s is not None and num_tokens and one.token_times_s and now_s - one.token_times_s[-1] > limit_s:
            self._num_late_gaps += 1
        one.token_times_s += [now_s] * num_tokens

    def end(self, request_id: str, error: str | None = None) -> None:
        """Record that a request has finished, or failed."""
        one = self._live[request_id]
        one.is_over, one.is_whole = True, error is None
        self.error = self.error or error
        if not self._goals.is_within(one.answer(one.sent_s)):
            self._missed.add(request_id)

    def is_lost(self, now_s: float) -> bool:
        """Whether the try misses its goals, whatever arrives from now on."""
        under_way = {key: one for key, one in self._live.items() if not one.is_over and key not in self._missed}
        beyond = [key for key, one in under_way.items() if self._goals.is_beyond(one.answer(now_s), one.max_tokens)]
        self._missed.update(beyond)
        return len(self._missed) > self._may_miss or self._num_late_gaps > self._may_be_late

    def answers(self, now_s: float) -> list[Answer]:
        """Return the answers of all sent requests, so far."""
        return [one.answer(now_s) for one in self._live.values()]


class WatchedTarget:
    """A target whose answers are counted on their way to the client."""

    def __init__(self, target: LoadTarget, live: LiveTry) -> None:
        self._target = target
        self._live = live

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Send a request, and record its tokens and its end."""
        self._live.begin(request.request_id, request.max_tokens, time.monotonic())
        try:
            async with aclosing(self._target.send(request)) as chunks:
                async for chunk in chunks:
                    self._live.receive(request.request_id, _count_tokens(chunk), chunk.received_s)
                    yield chunk
        except (RequestFailed, UserError) as error:
            self._live.end(request.request_id, str(error))
            raise
        self._live.end(request.request_id)


def _count_tokens(chunk: TokenChunk) -> int:
    """Return at least 1 token without IDs, so that no gap seems too long; 0 for a usage chunk."""
    if chunk.usage is not None:
        return 0
    return 1 if chunk.token_ids is None else len(chunk.token_ids)


async def run_try(
    target: LoadTarget, requests: Sequence[LoadRequest], goals: TryGoals
) -> tuple[list[Answer], bool, str | None]:
    """Send the requests at their times, until all are answered or the goals are out of reach.

    Returns:
        The answers; whether the try was cut; the error of the first request that failed.
    """
    live = LiveTry(goals, len(requests), sum(request.max_tokens - 1 for request in requests))
    load = asyncio.create_task(run_load(WatchedTarget(target, live), requests, progress=False))
    try:
        while not load.done():
            await asyncio.wait({load}, timeout=LOOK_S)
            now_s = time.monotonic()
            if not load.done() and live.is_lost(now_s):
                return live.answers(now_s), True, live.error
        records = load.result()
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
    return [_answer(record) for record in records], False, live.error


def _answer(record: RequestRecord) -> Answer:
    return Answer(sent_s=record.sent_s, token_times_s=record.token_times_s, is_whole=record.error is None)
