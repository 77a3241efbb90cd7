"""Event streams with a send and an acceptance that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from floodplain.server.streams import PING, Acceptance, EventStream

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
