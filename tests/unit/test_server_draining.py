from __future__ import annotations

import asyncio
import logging

import pytest

from floodplain.server.draining import Draining
from floodplain.web.gate import DrainSwitch


class Engine:
    """Requests that end by ``end``, or by a drain whose time is over; time passes only there."""

    def __init__(self, num_live: int) -> None:
        self.num_live = num_live
        self.now_s = 100.0
        self._is_empty = asyncio.Event()
        self.is_over = asyncio.Event(), asyncio.Event()  # drains that abort, and those that wait, may return
        for event in self.is_over:
            event.set()

    def end(self, number: int, at_s: float) -> None:
        self.num_live -= number
        self.now_s = at_s
        if not self.num_live:
            self._is_empty.set()

    async def drain(self, timeout_s: float) -> None:
        if self.num_live and timeout_s:
            await self._is_empty.wait()
        await self.is_over[timeout_s > 0].wait()

    async def abort(self) -> None:
        self._is_empty.set()
        await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def entries(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "floodplain")
    return caplog


def make(num_live: int, timeout_s: float = 30.0) -> tuple[Draining, Engine, DrainSwitch]:
    engine, switch = Engine(num_live), DrainSwitch()
    return Draining(engine, switch, timeout_s, lambda: engine.now_s), engine, switch  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_live", "requests", "them"), [(3, "3 requests", "them"), (1, "1 request", "it")])
async def test_the_log_says_what_is_awaited_and_how_it_ended(
    num_live: int, requests: str, them: str, entries: pytest.LogCaptureFixture
) -> None:
    """A server that waits for the drain ends when the last line is logged."""
    draining, engine, switch = make(num_live)
    draining.begin()
    assert switch.is_draining
    waiting = asyncio.ensure_future(draining.wait())
    await settle()
    engine.end(num_live - 1, at_s=102.0)
    await settle()
    assert not waiting.done() and len(entries.messages) == 1
    engine.end(1, at_s=104.25)
    await waiting
    assert entries.messages == [
        f"stopping: {requests} may finish within 30 s; a second signal aborts {them}",
        "stopped after 4.2 s: all requests ended",
    ]


async def test_requests_that_outlast_the_time_are_counted(entries: pytest.LogCaptureFixture) -> None:
    draining, engine, _ = make(2, timeout_s=1.5)
    draining.begin()
    await settle()
    engine.end(1, at_s=101.0)
    engine.now_s = 101.5
    await engine.abort()
    await settle()
    assert entries.messages == [
        "stopping: 2 requests may finish within 1.5 s; a second signal aborts them",
        "stopped after 1.5 s: 1 request aborted",
    ]


async def test_a_second_signal_aborts_and_tells_the_end_once(entries: pytest.LogCaptureFixture) -> None:
    draining, engine, _ = make(2)
    draining.begin()
    await settle()
    engine.now_s = 103.0
    draining.begin()
    await settle()
    engine.end(2, at_s=103.0)  # the first drain returns, too
    await settle()
    assert entries.messages[1:] == ["stopping at once: 2 requests aborted", "stopped after 3.0 s: 2 requests aborted"]


async def test_an_idle_server_has_nothing_to_await(entries: pytest.LogCaptureFixture) -> None:
    make(0)[0].begin()
    await settle()
    assert entries.messages == ["stopping: no request is live"]


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_server_waits_for_every_drain_that_began(is_waiting: bool) -> None:
    draining, engine, _ = make(1)
    engine.is_over[is_waiting].clear()
    draining.begin()
    await settle()
    draining.begin()
    engine.end(1, at_s=101.0)
    waiting = asyncio.ensure_future(draining.wait())
    await settle()
    assert not waiting.done()
    engine.is_over[is_waiting].set()
    await waiting
