"""Delays between an instance's dials: they double without a life, and are reset after one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any, cast

import pytest

from floodplain.cluster.instance import instance
from floodplain.cluster.instance.instance import FIRST_DELAY_S, MOST_DELAY_S, Dialer
from floodplain.cluster.wire.messages import Hello, Welcome
from floodplain.core.codec import WireError, to_json
from tests.support.cluster_peers import FACTS, until
from tests.support.waiting import HANG_S


class Member:
    """A member that is always at rest."""

    async def rest(self) -> None:
        pass

    def hello(self, token: str) -> Hello:
        return Hello(token, FACTS)


def delays_between(lives: Sequence[bool | None], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays after dials: refused connection (None), served life (True), or no life (False)."""
    member: Any = Member()
    dialer, left, waited = Dialer(member, "127.0.0.1", 1, "token", 1.0), list(lives), list[float]()

    async def open_connection(*address: object) -> tuple[Any, Any]:
        if left[0] is None:
            raise ConnectionRefusedError
        return None, None

    async def serve(link: object) -> bool:
        return bool(left[0])

    async def wait_for(awaitable: Any, timeout: float) -> None:
        awaitable.close()
        waited.append(timeout)
        del left[0]
        if not left:
            dialer._is_stopping.set()
        raise TimeoutError

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    monkeypatch.setattr(dialer, "_serve", serve)
    asyncio.run(dialer._dial())
    return waited


async def test_a_second_signal_ends_an_instance_that_still_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    member = BusyMember()
    dialer = Dialer(cast(Any, member), "host", 7, "token", 1.0)

    async def open_connection(*address: object) -> tuple[Any, Any]:
        return None, None

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    monkeypatch.setattr(instance, "FrameLink", lambda *streams: Link(Welcome(1, 1.0, 1.0)))
    monkeypatch.setattr(instance, "Session", lambda *_: member)
    running = asyncio.create_task(dialer.run())
    await asyncio.wait_for(member.is_live.wait(), HANG_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(dialer._is_stopping.is_set)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, HANG_S)
    assert member.is_closed


class BusyMember(Member):
    """A member, and its session, whose requests never end."""

    engine = open_role = None

    def __init__(self) -> None:
        self.is_live, self.is_closed = asyncio.Event(), False

    async def start(self) -> None:
        pass

    async def run(self, *_: object) -> None:
        self.is_live.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


class Link:
    """A connection to what listens there: its answer to a hello is a welcome, an exception, None, or silence."""

    def __init__(self, answer: object) -> None:
        self._answer, self.is_closed = answer, False

    def send(self, frame: bytes) -> None:
        pass

    async def read(self, timeout_s: float) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        if isinstance(self._answer, Exception):
            raise self._answer
        if isinstance(self._answer, Welcome):
            return {"kind": "Welcome", **to_json(self._answer)}, ()
        if self._answer is not None:
            await asyncio.Event().wait()
        return None

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_router_that_says_nothing_does_not_delay_the_end(
    is_connected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It drops packets, or it accepts connections and is stopped."""
    dialer, link = Dialer(cast(Any, Member()), "host", 7, "token", 1.0), Link("silence")

    async def open_connection(*address: object) -> tuple[Any, Any]:
        if not is_connected:
            await asyncio.Event().wait()
        return None, None

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    monkeypatch.setattr(instance, "FrameLink", lambda *streams: link)
    dialling = asyncio.create_task(dialer._dial())
    for _ in range(9):
        await asyncio.sleep(0)
    assert not dialling.done()
    dialer._is_stopping.set()
    await asyncio.wait_for(dialling, HANG_S)
    assert link.is_closed == is_connected and not caplog.records


async def test_the_log_says_once_why_no_router_takes_the_instance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dialer = Dialer(cast(Any, Member()), "host", 7, "token", 1.0)
    refused, no_frame = ConnectionRefusedError(111, "Connection refused"), WireError("a frame of 9 bytes")
    answers = [refused, refused, None, None, no_frame, no_frame]

    async def open_connection(*address: object) -> tuple[Any, Any]:
        if answers[0] is refused:
            raise answers.pop(0)  # type: ignore[misc]
        return None, None

    async def wait_for(awaitable: Any, timeout: float) -> None:
        awaitable.close()
        if not answers:
            dialer._is_stopping.set()
        raise TimeoutError

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    monkeypatch.setattr(instance, "FrameLink", lambda *streams: Link(answers.pop(0)))
    await dialer._dial()
    assert [record.message for record in caplog.records] == [
        f"no router takes this instance at host:7: {why}; it goes on dialling"
        for why in (
            "Connection refused",
            "it is not ready, or this is not its --instance-address",
            "this is not its --instance-address (a frame of 9 bytes)",
        )
    ]


@pytest.mark.parametrize("is_taken", [None, False])
def test_waits_double_up_to_a_bound_whatever_the_router_does(
    is_taken: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = delays_between([is_taken] * 12, monkeypatch)
    assert waited == [min(MOST_DELAY_S, FIRST_DELAY_S * 2**number) for number in range(12)]
    assert waited[-1] == MOST_DELAY_S


def test_after_a_life_the_first_wait_is_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = delays_between([None, False, True, None], monkeypatch)
    assert waited == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]
