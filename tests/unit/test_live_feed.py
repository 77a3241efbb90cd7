"""The feed: nothing is computed without listeners, once for all of them, and a slow one is dropped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from floodplain.live.changes import Snapshot, apply
from floodplain.live.feed import MOST_BEHIND, MOST_LISTENERS, Feed, Look
from floodplain.live.rows import Row


class Service:
    """A service whose time passes when the test says so."""

    def __init__(self) -> None:
        self.num_opened = self.num_looks = 0
        self.is_ending = False
        self.fails = False
        self._ticks: asyncio.Queue[None] = asyncio.Queue()
        self.feed = Feed(self.open, lambda: self.is_ending, sleep=self.sleep)

    def open(self) -> Look:
        self.num_opened += 1

        async def look() -> Snapshot:
            self.num_looks += 1
            if self.fails:
                raise OSError("no more")
            rows = {n: Row(n, self.num_looks, 1, "running", 3, ((0.0, "arrived", 0),), None, None) for n in (1, 2)}
            return Snapshot({"looks": self.num_looks, "same": [1]}, rows)

        return look

    async def sleep(self, _: float) -> None:
        await self._ticks.get()

    async def tick(self) -> None:
        """Let the next update be made."""
        self._ticks.put_nowait(None)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def service() -> Service:
    return Service()


async def next_of(stream: AsyncGenerator[bytes]) -> dict[str, Any]:
    event = await anext(stream)
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    message: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return message


async def test_nothing_is_computed_without_a_listener(service: Service) -> None:
    await service.tick()
    assert service.num_looks == 0
    stream = service.feed.listen()
    assert (await next_of(stream))["type"] == "whole"
    await stream.aclose()
    await service.tick()
    num_looks = service.num_looks
    for _ in range(5):
        await service.tick()
    assert service.num_looks == num_looks and not service.feed._listeners


async def test_all_listeners_share_one_look_and_one_encoding(service: Service) -> None:
    streams = [service.feed.listen() for _ in range(3)]
    firsts = await asyncio.gather(*map(anext, streams))
    await service.tick()
    seconds = [await anext(stream) for stream in streams]
    assert service.num_looks == 2 and service.num_opened == 1
    assert all(event is seconds[0] for event in seconds) and all(event is firsts[0] for event in firsts)


async def test_a_late_listener_begins_with_the_whole_and_then_gets_changes(service: Service) -> None:
    early, late = service.feed.listen(), service.feed.listen()
    await anext(early)
    joining = asyncio.ensure_future(next_of(late))
    await service.tick()
    first = await joining
    await anext(early)
    await service.tick()
    second = await next_of(late)
    assert (first["type"], second["type"]) == ("whole", "change")
    now = apply(apply(Snapshot({}), first), second)
    assert now.head == {"looks": 3, "same": [1]} and now.rows[1].tokens == 3
    assert second["head"] == {"looks": 3} and second["grown"] == [[1, 3, 1], [2, 3, 1]]


async def test_a_slow_listener_is_dropped_and_others_go_on(service: Service) -> None:
    dropped: list[str] = []
    slow, quick = (service.feed.listen(partial(dropped.append, name)) for name in ("slow", "quick"))
    await anext(slow)
    await anext(quick) if service.num_looks > 1 else None
    reading = asyncio.ensure_future(next_of(quick))
    for _ in range(MOST_BEHIND + 2):
        await service.tick()
        await reading
        reading = asyncio.ensure_future(next_of(quick))
    assert len(service.feed._listeners) == 1 and dropped == ["slow"]
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    reading.cancel()


async def test_listeners_end_when_the_service_stops_or_fails(service: Service) -> None:
    stream = service.feed.listen()
    await anext(stream)
    service.is_ending = True
    await service.tick()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    again = service.feed.listen()
    with pytest.raises(StopAsyncIteration):  # not for ever
        await anext(again)
    service.is_ending, service.fails = False, True
    failing = service.feed.listen()
    with pytest.raises(StopAsyncIteration):
        await anext(failing)


async def test_one_listener_more_than_there_may_be_takes_the_place_of_the_oldest(service: Service) -> None:
    dropped: list[int] = []
    streams = [service.feed.listen(partial(dropped.append, number)) for number in range(MOST_LISTENERS + 1)]
    await asyncio.gather(*map(anext, streams[:-1]))
    assert dropped == []
    joining = asyncio.ensure_future(next_of(streams[-1]))
    await service.tick()
    assert (await joining)["type"] == "whole" and dropped == [0]
    assert len(service.feed._listeners) == MOST_LISTENERS
    with pytest.raises(StopAsyncIteration):
        await anext(streams[0])
    assert (await next_of(streams[1]))["type"] == "change"
