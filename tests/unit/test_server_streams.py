"""Merged streams of choices; event streams with a send and an acceptance that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.plan import PromptLogprobs, TokenLogprobs
from floodplain.engine.outputs import OutputDelta
from floodplain.server.streams import PING, Acceptance, EventStream, Tally, gather, merge, share_prompt, unless_hung_up
from floodplain.web.errors import ApiError
from tests.support.waiting import HANG_S


class Source:
    """A stream that records its close; after its last delta it ends, raises ``fails``, or hangs."""

    def __init__(self, num_deltas: int, *, fails: Exception | None = None, is_endless: bool = False) -> None:
        self.num_deltas = num_deltas
        self.fails = fails
        self.is_endless = is_endless
        self.is_closed = False

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        try:
            for i in range(self.num_deltas):
                await asyncio.sleep(0)
                yield OutputDelta(chr(97 + i), (i,), None, num_cached_tokens=4)
            if self.fails:
                raise self.fails
            if self.is_endless:
                await asyncio.Event().wait()
            yield OutputDelta("!", (99,), "stop", num_cached_tokens=4)
        finally:
            self.is_closed = True


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(bounded())


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_merging_keeps_every_stream_whole_and_in_order(lengths: list[int]) -> None:
    async def work() -> None:
        sources = [Source(n) for n in lengths]
        tally = Tally(10)
        outputs = await gather(merge([s.deltas() for s in sources]), len(sources), tally)
        assert [o.token_ids for o in outputs] == [(*range(n), 99) for n in lengths]
        assert [o.text for o in outputs] == ["abcdefgh"[:n] + "!" for n in lengths]
        assert all(o.finish_reason == "stop" for o in outputs)
        assert all(s.is_closed for s in sources)
        usage = tally.usage()
        assert (usage.completion_tokens, usage.total_tokens) == (
            sum(lengths) + len(lengths),
            10 + usage.completion_tokens,
        )
        assert usage.prompt_tokens_details.cached_tokens == 4 * len(lengths)

    run(work)


@given(st.lists(st.integers(0, 8), min_size=2, max_size=5))
def test_choices_begin_with_the_first_delta_of_the_first_one(lengths: list[int]) -> None:
    async def work() -> None:
        sources = [Source(n) for n in lengths]
        tally, order = Tally(10, num_choices=len(lengths)), list[int]()
        async with aclosing(merge(share_prompt([s.deltas() for s in sources]))) as merged:
            async for index, delta in merged:
                tally.add(index, delta)
                order.append(index)
        assert order[0] == 0 and [order.count(i) for i in range(len(lengths))] == [n + 1 for n in lengths]
        assert all(s.is_closed for s in sources)
        usage = tally.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (10, len(order))
        assert usage.prompt_tokens_details.cached_tokens == 4
        assert tally.usage_of(1).prompt_tokens == 10

    run(work)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=4), st.sampled_from([None, (), (TokenLogprobs(-1.0, ()),)]))
def test_each_choice_begins_with_the_log_probabilities_of_the_prompt(
    lengths: list[int], scores: PromptLogprobs | None
) -> None:
    async def scored(source: Source) -> AsyncGenerator[OutputDelta, None]:
        """As an engine gives them: with the first delta."""
        left = scores
        async for delta in source.deltas():
            yield replace(delta, prompt_logprobs=left)
            left = None

    async def work() -> None:
        first, *others = [Source(n) for n in lengths]
        streams = [scored(first), *(one.deltas() for one in others)]
        found: dict[int, list[PromptLogprobs | None]] = {}
        async with aclosing(merge(share_prompt(streams))) as merged:
            async for index, delta in merged:
                found.setdefault(index, []).append(delta.prompt_logprobs)
        assert found == {index: [scores] + [None] * n for index, n in enumerate(lengths)}

    run(work)


async def test_a_failure_of_the_first_choice_ends_all() -> None:
    sources = [Source(0, fails=ValueError("full")), Source(3), Source(0, is_endless=True)]
    with pytest.raises(ValueError, match="full"):
        await gather(merge(share_prompt([s.deltas() for s in sources])), 3, Tally(0, num_choices=3))


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_leaving_early_closes_every_stream(num_streams: int) -> None:
    sources = [Source(3, is_endless=True) for _ in range(num_streams)]
    async with aclosing(merge([s.deltas() for s in sources])) as merged:
        async for _ in merged:
            break
    assert all(s.is_closed for s in sources)


async def test_one_failure_closes_the_others_and_is_raised() -> None:
    sources = [Source(1, is_endless=True), Source(2, fails=ValueError("broken"))]
    with pytest.raises(ValueError, match="broken"):
        await gather(merge([s.deltas() for s in sources]), 2, Tally(0))
    assert all(s.is_closed for s in sources)


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize(("reason", "status", "words"), [("abort", 503, "stopped"), ("error", 500, "--dtype")])
async def test_a_request_without_an_end_is_an_error(num_streams: int, reason: str, status: int, words: str) -> None:
    async def aborted() -> AsyncGenerator[OutputDelta, None]:
        yield OutputDelta("a", (1,))
        yield OutputDelta("", (), reason)

    with pytest.raises(ApiError, match=words) as caught:
        await gather(merge([aborted() for _ in range(num_streams)]), num_streams, Tally(0))
    assert caught.value.status_code == status


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_work_that_ends_first_is_the_answer() -> None:
    assert await unless_hung_up(never, asyncio.sleep(0, "done")) == "done"

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_hung_up(never, fail())
    assert len(asyncio.all_tasks()) == 1


async def test_a_hang_up_cancels_the_work_and_waits_for_its_end() -> None:
    source, has_begun = Source(2, is_endless=True), asyncio.Event()

    async def begin() -> None:
        async with aclosing(merge([source.deltas()])) as merged:
            async for _ in merged:
                has_begun.set()

    async def receive() -> dict[str, Any]:
        await has_begun.wait()
        return {"type": "http.disconnect"}

    assert await unless_hung_up(receive, begin()) is None
    assert source.is_closed
    assert len(asyncio.all_tasks()) == 1


# -- event streams -----------------------------------------------------------------------------------------------------


FAILED = b"data: failed\n\n"
FOREVER_S = 3600.0


class Play:
    """One stream: ``put`` adds an event or a failure; ``sent`` is what the client got."""

    def __init__(self, ping_s: float = FOREVER_S) -> None:
        self.accepted = asyncio.Event()
        self.sent: list[bytes | str] = []
        self.num_sent = asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.has_hung_up = asyncio.Event()
        self.is_closed = False
        self._events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        stream = EventStream(self._source(), self.accepted, ping_s, lambda _: FAILED)
        self.task = asyncio.create_task(stream({"type": "http"}, self._receive, self._send))

    def put(self, event: bytes | Exception | None) -> None:
        self._events.put_nowait(event)

    async def until(self, num: int) -> list[bytes | str]:
        for _ in range(num):
            await self.num_sent.acquire()
        return self.sent

    async def end(self) -> list[bytes | str]:
        """What was sent when the stream has ended, which leaves no task."""
        await self.task
        assert len(asyncio.all_tasks()) == 1
        return self.sent

    async def _source(self) -> AsyncGenerator[bytes, None]:
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_closed = True

    async def _receive(self) -> dict[str, Any]:
        await self.has_hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.gate.wait()
        is_head = message["type"] == "http.response.start"
        self.sent.append("head" if is_head else message["body"] if message["more_body"] else message["body"] + b"$")
        self.num_sent.release()


async def test_the_head_is_sent_at_acceptance_and_events_follow() -> None:
    one = Play()
    one.accepted.set()
    assert await one.until(1) == ["head"]
    for event in (b"a", b"b", None):
        one.put(event)
    assert await one.end() == ["head", b"a", b"b", b"$"]


@pytest.mark.parametrize("ping_s", [0.0, FOREVER_S])
@pytest.mark.parametrize("events", [[b"a", None], [None], [b"a", KeyError()]])
async def test_events_that_are_there_at_once_have_one_head_before_them(events: list[Any], ping_s: float) -> None:
    for is_accepted in (False, True):
        one = Play(ping_s)
        if is_accepted:
            one.accepted.set()
        for event in events:
            one.put(event)
        end = FAILED + b"$" if isinstance(events[-1], Exception) else b"$"
        assert await one.end() == ["head", *events[:-1], end]


async def test_a_refusal_before_acceptance_is_raised_and_nothing_is_sent() -> None:
    one = Play()
    one.put(KeyError("refused"))
    with pytest.raises(KeyError, match="refused"):
        await one.end()
    assert (one.sent, one.is_closed, len(asyncio.all_tasks())) == ([], True, 1)


async def test_a_failure_while_the_head_is_on_its_way_is_an_event() -> None:
    one = Play()
    one.gate.clear()
    one.accepted.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    one.put(KeyError())
    one.put(None)
    while not one.is_closed:
        await asyncio.sleep(0)
    one.gate.set()
    assert await one.end() == ["head", FAILED + b"$"]


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_silences_have_comments_before_and_between_events(is_accepted: bool) -> None:
    """Without acceptance the head is sent after one interval: later failures are events."""
    one = Play(ping_s=0.001)
    if is_accepted:
        one.accepted.set()
    assert await one.until(4) == ["head", PING, PING, PING]
    one.put(b"a")
    while one.sent[-1] != b"a":
        await one.until(1)
    assert (await one.until(2))[-2:] == [PING, PING]
    one.put(KeyError())
    assert (await one.end())[-1] == FAILED + b"$"


@pytest.mark.parametrize("is_accepted", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
async def test_a_hang_up_closes_the_events(is_accepted: bool, is_held: bool) -> None:
    """While an event is awaited, or is being sent to a client that does not read."""
    one = Play()
    if is_accepted:
        one.accepted.set()
        await one.until(1)
    if is_held:
        one.gate.clear()
        one.put(b"a")
    await asyncio.sleep(0)
    one.has_hung_up.set()
    await one.end()
    assert one.is_closed


def test_requests_of_several_prompts_are_accepted_together() -> None:
    acceptance = Acceptance(3)
    seen = []
    for _ in range(3):
        seen.append(acceptance.is_whole.is_set())
        acceptance.note()
    assert (seen, acceptance.is_whole.is_set()) == ([False] * 3, True)
